"""An answer of a trace that is malformed is a DecodeError, and changes no container of the user."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_engine.remote_backend.values.outcomes import read_outcomes
from nnsight_engine.serialization import DecodeError, encode, encode_error

BLOCK: dict[str, Any] = {
    "index": 0, "choice": 0, "saves": {"x": 1}, "error": None, "shapes": {}, "flows": {"y": 2}, "warnings": []
}  # fmt: skip
WRONG: list[Any] = [None, -1.5, "text", [1], {1: 2}, (1, 2)]


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in BLOCK.items() if key != name}


def answers() -> list[Any]:
    """Return answers with each part left out, and with each part of each wrong type."""
    found: list[Any] = [None, [], {}, {"blocks": []}, {"blocks": None, "before": [[1]]}, {"before": [[1]]}]
    found += [{"blocks": [wrong], "before": [[9]]} for wrong in WRONG]
    for name in ("index", "choice", "saves", "error", "shapes"):
        found.append({"blocks": [without(name)], "before": [[9]]})
    for name, value in BLOCK.items():
        for wrong in WRONG:
            if type(wrong) is not type(value) and not (name == "warnings" and wrong == []):
                found.append({"blocks": [{**BLOCK, name: wrong}], "before": [[9]]})
    before: list[Any] = [3, "a", [], [[9], [9]], [3], ["ab"], [{9: 9}], [{9}], [(9,)], {0: [9]}]
    return [*found, *({"blocks": [BLOCK], "before": wrong} for wrong in before)]


@pytest.mark.parametrize("answer", answers(), ids=repr)
def test_a_malformed_answer_is_a_decode_error(answer: Any) -> None:
    own = [1]
    with pytest.raises(DecodeError):
        read_outcomes(encode(answer), [own])
    assert own == [1]


def test_an_answer_fills_the_containers_of_the_user() -> None:
    own: list[Any] = [[1], {1: 1}, {1}]
    inner = [2]
    before = [inner, {2: inner}, {2}]
    error = encode_error(ValueError("x"))
    data = encode({"blocks": [{**BLOCK, "saves": {"x": inner}, "error": error}], "before": before})
    (outcome,) = read_outcomes(data, own)
    assert own == [[2], {2: [2]}, {2}]
    assert outcome.saves["x"] is own[0] is own[1][2]
    assert isinstance(outcome.error, ValueError)
