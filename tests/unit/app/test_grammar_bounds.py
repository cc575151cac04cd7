"""Grammars are refused for what is written in them, in a time that their length bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_schemas.errors import ApiError
from app.engine.grammars import GrammarBounds

BOUNDS = GrammarBounds(max_bytes=4096, max_repeats=100, max_alternatives=10, max_nesting=8)
LONG = GrammarBounds(max_bytes=2**18, max_repeats=100, max_alternatives=2**18, max_nesting=2**18)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("kind", "text", "setting"),
    [
        ("regex", "a" * 4097, "bytes of text"),
        ("regex", "é" * 2049, "bytes of text"),
        ("regex", "\ud800" * 1400, "bytes of text"),
        ("json", json.dumps({"description": "a" * 4097}), "bytes of text"),
        ("regex", "a{101}", "repetitions"),
        ("regex", "a{1,101}", "repetitions"),
        ("regex", "a{,101}", "repetitions"),
        ("regex", "a{101,}", "repetitions"),
        ("regex", "a{" + "9" * 3000 + "}", "repetitions"),
        ("regex", r"\\{101}", "repetitions"),
        ("regex", "[ab]{101}", "repetitions"),
        ("regex", "|".join("abcdefghijk"), "alternatives"),
        ("regex", "(" * 8 + "a" + ")" * 8, "levels of nesting"),
        ("grammar", 'root ::= "a"{101}', "repetitions"),
        ("grammar", "start: A~2..101\nA: /a/", "repetitions"),
        ("grammar", "root ::= " + " | ".join(f'"{i}"' for i in range(11)), "alternatives"),
        ("choice", json.dumps([str(i) for i in range(11)]), "alternatives"),
        ("json", json.dumps({"enum": list(range(11))}), "alternatives"),
        ("json", json.dumps({"items": {"anyOf": [{}] * 11}}), "alternatives"),
        ("json", json.dumps({"properties": {"a": {"pattern": "a{101}"}}}), "repetitions"),
        ("json", json.dumps({"patternProperties": {"a{101}": {}}}), "repetitions"),
        ("json", json.dumps(nested(8)), "levels of nesting"),
        (
            "structural_tag",
            json.dumps({"format": {"type": "regex", "pattern": "a{101}"}}),
            "repetitions",
        ),
        ("structural_tag", json.dumps({"format": {"grammar": 'root ::= "a"{101}'}}), "repetitions"),
    ],
)
def test_what_is_beyond_a_bound_is_refused_by_its_setting(kind: str, text: str, setting: str) -> None:
    with pytest.raises(ApiError, match=setting) as raised:
        BOUNDS.check(kind, text)
    assert raised.value.code == "invalid_value"
    assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a{100}"),
        ("regex", r"\{101\}"),
        ("regex", "[(|{101}]" * 20),
        ("regex", "(a)" * 50),
        ("regex", r"\(" * 50),
        ("grammar", 'root ::= "a{101} | ( | ( | ( | ( | ( | ( | ( | ( | ( | ("'),
        ("choice", json.dumps(["a{101}" * 9, "((((((((((("])),
        ("json", json.dumps({"properties": {"pattern": {"description": "a{101}", "maxLength": 10**6}}})),
        ("json", json.dumps({"const": {"pattern": "a{101}"}, "enum": ["a{101}"], "default": nested(20)})),
        ("json", json.dumps(nested(7))),
        ("json", "{"),
        ("json_object", ""),
        ("structural_tag", "[" * 4000),
    ],
)
def test_what_is_within_them_is_left_to_the_compiler(kind: str, text: str) -> None:
    BOUNDS.check(kind, text)


@pytest.mark.parametrize(
    "part", ["[", '"', "(", "|", "{", "{1", "\\", "~", "~1", "[]", '"\\', "{1,", "a", "1"]
)
@pytest.mark.parametrize("kind", ["regex", "grammar"])
@pytest.mark.timeout(60)  # against minutes if characters are looked at again and again
def test_no_text_is_looked_at_again_and_again(kind: str, part: str) -> None:
    text = part * (LONG.max_bytes // len(part) - 1)
    LONG.check(kind, text)
    LONG.check(kind, "{" + text)
