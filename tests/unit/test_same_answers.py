"""The comparison of two engines' answers finds what differs, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nnsight_engine.core.tensor_bytes import tensor_to_bytes
from nnsight_engine.plans.collect.results import (
    CollectedCapture,
    CollectedFeatures,
    CollectedLens,
    CollectedResults,
    CollectedToken,
    TensorResult,
)
from tests.e2e.fuzz.judge import Choice
from tests.e2e.fuzz.player import Answer
from tests.e2e.same_answers import CHUNKED_TRACE, ONE_STEP, decoded, differences, encoded

ROWS = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def answer(
    rows: torch.Tensor = ROWS, positions: tuple[int, ...] = (3, 4), token: int = 5, rank: int | None = 1
) -> Answer:
    """Return an answer with two results."""
    data = tensor_to_bytes(rows)
    capture = CollectedCapture(
        "c", list(positions), "none", {"logits": TensorResult("float32", (2, 8), data)}
    )
    lens = CollectedLens("l", [3], {0: [([], [CollectedToken(7, -1.5, rank)])]})
    return Answer([Choice([1, token], [{1: -0.5}, {token: -0.25}], CollectedResults([capture, lens]))])


def found(got: Answer, wanted: Answer) -> list[str]:
    """Return the differences of two answers that were written and read."""
    one, other = decoded(encoded([got, wanted]))
    return differences(one, other)


def test_rounding_and_the_way_of_the_steps_are_no_differences() -> None:
    assert not found(answer(), answer(ROWS + 1e-5))
    assert not found(answer(), dataclasses.replace(answer(), recomputed=3, cached=32))


@pytest.mark.parametrize(
    "other",
    [
        answer(ROWS + 1e-3),
        answer(positions=(3, 5)),
        answer(token=6),
        answer(rank=3),
        answer(rank=None),
        Answer(),
    ],
    ids=["a value", "a position", "a token", "a rank", "no rank", "no choice"],
)
def test_what_differs_is_found(other: Answer) -> None:
    assert found(answer(), other)
    assert found(other, answer())


def ranked(*members: tuple[int, float]) -> Answer:
    """Return an answer with one ranking in three places: sampling, a lens, and features."""
    lens = CollectedLens("l", [3], {0: [([CollectedToken(*member) for member in members], [])]})
    features = CollectedFeatures("f", [3], [list(members)])
    return Answer([Choice([1], [dict(members)], CollectedResults([lens, features]))])


RANKED = ranked((4, -0.5), (7, -1.5), (9, -1.500001))


def test_members_of_a_ranking_that_are_nearly_equal_may_change_places() -> None:
    assert not found(RANKED, ranked((4, -0.5), (9, -1.5), (7, -1.500001)))
    assert not found(RANKED, ranked((4, -0.5), (7, -1.5), (8, -1.500001)))
    assert not found(answer(rank=1), answer(rank=2))


@pytest.mark.parametrize(
    "other",
    [
        ranked((7, -1.5), (4, -0.5), (9, -1.500001)),
        ranked((4, -0.5), (7, -1.5), (9, -1.6)),
        ranked((5, -0.5), (7, -1.5), (9, -1.500001)),
        ranked((4, -0.5), (7, -1.5)),
        ranked((4, -0.5), (7, -1.5), (9, float("nan"))),
    ],
    ids=["the order", "a value", "a member", "the number", "not a number"],
)
def test_each_ranking_that_differs_is_found(other: Answer) -> None:
    assert len({entry.split(" ")[0] for entry in found(RANKED, other)}) == 3
    assert found(other, RANKED)


def test_a_chosen_token_that_ties_with_the_last_ranked_one_may_be_beside_the_ranking() -> None:
    def logged(*logprobs: float) -> Answer:
        return Answer([Choice([0], [dict(enumerate(logprobs))], None)])

    assert not found(logged(-1.0, -1.0), logged(-1.0, -1.0, -1.0))
    assert not found(logged(-1.0, -1.0, -1.0), logged(-1.0, -1.0))
    assert found(logged(-1.0, -1.0), logged(-1.0, -1.0, -1.5))
    assert found(logged(-0.5, -1.0), logged(-0.5, -1.0, -1.0))
    assert found(logged(-1.0), logged(-1.0, -1.0, -1.0))


def test_a_request_that_needs_its_prompt_in_one_step_may_fail_only_where_it_was_split() -> None:
    for error in (("unsupported_combination", f"it {ONE_STEP}"), (CHUNKED_TRACE, "")):
        assert not found(answer(), Answer(error=error, was_split=True))
        assert found(answer(), Answer(error=error))
    assert found(answer(), Answer(error=("internal", ""), was_split=True))
