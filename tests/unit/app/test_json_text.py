"""Answers are strict JSON in UTF-8, whatever stands in them."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.json_text import JsonAnswer, json_text

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def refuse(name: str) -> None:
    raise AssertionError(name)


@given(VALUES)
def test_every_value_is_json_that_utf_8_can_hold(value: Any) -> None:
    json.loads(json_text(value).encode("utf-8"), parse_constant=refuse)


@given(st.recursive(st.integers() | st.text(st.characters(exclude_categories=["Cs"])), st.lists))
def test_what_json_has_is_as_it_was(value: Any) -> None:
    assert json.loads(json_text(value)) == value


def test_what_json_has_not_is_null_and_an_escape() -> None:
    value = {"logprob": math.nan, "top": [math.inf, -math.inf, 1.5], "a\ud800": ("é\udfff", "\U0001f600")}
    assert json.loads(bytes(JsonAnswer(value).body)) == {
        "logprob": None,
        "top": [None, None, 1.5],
        "a\\ud800": ["é\\udfff", "\U0001f600"],
    }
