"""Estimates of a request's tokens from an unvalidated body."""

from __future__ import annotations

from typing import Any

import pytest

from app.admission.estimates import Estimate, num_choices, of_body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [[1], [2]], "n": "3"}, 6),
        ({"prompt": "a", "n": 3.0}, 3),
        ({"prompt": "a", "prompt_embeds": ["", ""], "n": 2}, 6),
        ({"messages": [], "n": 5}, 5),
        ({"n": -1}, 1),
        ({"prompt": ["a"] * 1024, "n": 16384}, 2**24),
        ({"prompt": None, "n": {"a": 1}}, 1),
    ],
)
def test_choices_are_counted_as_the_engine_reads_them(body: dict[str, Any], expected: int) -> None:
    assert num_choices(body) == expected


def test_every_choice_generates_something() -> None:
    assert of_body({"prompt": ["a"] * 4, "n": 8}) == Estimate(stated=32, guessed=4)
    assert of_body({"prompt": "a", "max_tokens": "50"}) == Estimate(stated=50, guessed=1)
