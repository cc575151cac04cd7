"""Captured bytes are counted to the last: what fits is taken, what is released is free, and once only."""

from __future__ import annotations

import sys

import pytest

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.step.context import ByteLedger


@pytest.fixture
def ledger() -> ByteLedger:
    return ByteLedger(max_request_bytes=100, max_engine_bytes=150)


def test_a_request_may_hold_its_limit_and_no_byte_more(ledger: ByteLedger) -> None:
    ledger.reserve("a", 60)
    ledger.reserve("a", 40)
    with pytest.raises(InterventionError, match="101") as caught:
        ledger.reserve("a", 1)
    assert caught.value.code == "capture_too_large"
    assert ledger.total_bytes == 100


def test_all_together_may_hold_the_engines_limit_and_no_byte_more(ledger: ByteLedger) -> None:
    ledger.reserve("a", 100)
    ledger.reserve("b", 50)
    with pytest.raises(InterventionError) as caught:
        ledger.reserve("c", 1)
    assert caught.value.code == "engine_capture_full"
    assert not ledger.reserve_all(1)
    assert ledger.total_bytes == 150


def test_what_a_request_held_is_free_once(ledger: ByteLedger) -> None:
    ledger.reserve("a", 100)
    ledger.reserve("b", 50)
    for _ in range(2):
        ledger.release("a")
        assert ledger.total_bytes == 50
    ledger.give_back("a", 10)
    assert ledger.total_bytes == 50
    ledger.reserve("a", 100)


def test_scratch_that_is_given_back_is_free_for_the_request_too(ledger: ByteLedger) -> None:
    ledger.reserve("a", 100)
    ledger.give_back("a", 30)
    assert ledger.total_bytes == 70
    ledger.reserve("a", 30)
    ledger.release("a")
    assert ledger.total_bytes == 0


def test_bytes_of_several_are_counted_when_they_are_reserved_and_owned_when_assigned(
    ledger: ByteLedger,
) -> None:
    assert ledger.reserve_all(90)
    ledger.assign("a", 60)
    ledger.give_back_all(30)
    assert ledger.total_bytes == 60
    assert ledger.num_steps("a", 10, 0) == 4
    ledger.release("a")
    assert ledger.total_bytes == 0


@pytest.mark.parametrize(
    ("kept", "scratch", "expected"),
    [
        (100, 0, 1),
        (101, 0, 0),
        (50, 0, 2),
        (34, 0, 2),
        (50, 50, 1),
        (50, 51, 0),
        (0, 100, sys.maxsize),
        (0, 101, 0),
    ],
)
def test_as_many_steps_fit_as_there_is_room_for(
    ledger: ByteLedger, kept: int, scratch: int, expected: int
) -> None:
    assert ledger.num_steps("a", kept, scratch) == expected
