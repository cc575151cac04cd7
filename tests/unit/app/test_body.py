"""Bodies: limits and refusals before and while parsing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.errors import ApiError
from app.body_json import exceeds_depth, parse_object

MAX_DEPTH = 4

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\[]{}\n\u2200'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='k"\\[]{'), inner, max_size=4)
    ),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(inner) for inner in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(inner) for inner in value), default=0)
    return 0


@given(json_values, st.booleans())
def test_depth_is_counted_as_a_parser_would(value: object, ascii_only: bool):
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert exceeds_depth(body, MAX_DEPTH) == (depth_of(value) > MAX_DEPTH)


def test_depth_is_counted_across_chunks():
    padding = json.dumps("[" * 3_000_000)
    deep = f"[{padding},[[[{padding}]]]]".encode()
    assert not exceeds_depth(deep, 4)
    assert exceeds_depth(deep, 3)


def test_large_integers_and_a_byte_order_mark_are_fine():
    assert parse_object(b'\xef\xbb\xbf{"a": ' + b"9" * 400 + b"}") == {"a": int("9" * 400)}


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '"a\\uDFFFb"', '"\\udc00\\ud800"', '{"\\ud83d": 1}', '["\\ud83d\\ud83d\\ude00"]']
)
def test_half_of_a_character_is_refused_wherever_it_stands(text: str) -> None:
    with pytest.raises(ApiError, match="lone surrogate") as caught:
        parse_object(f'{{"b": "whole", "a": [{text}]}}'.encode())
    assert (caught.value.code, caught.value.param) == ("invalid_json", "a")


def test_a_character_of_two_escapes_is_whole() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}') == {"a": "\U0001f600", "b": "\\ud800"}
