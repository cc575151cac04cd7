"""Which of several engines runs a trace."""

from __future__ import annotations

from nnsight_engine.vllm_backend.trace_placement import TracePlacement

IDLE = [0, 0, 0]


def placed(placement: TracePlacement, key: str, num_requests: int, in_flight: list[int]) -> int:
    placement.place(key, num_requests, in_flight)
    return placement.rank(key)


def test_idle_engines_take_turns() -> None:
    placement = TracePlacement(3)
    ranks = []
    for key in "abcd":
        ranks.append(placed(placement, key, 1, IDLE))
        placement.remove(key)
    assert ranks == [0, 1, 2, 0]


def test_a_trace_goes_where_the_fewest_requests_are() -> None:
    placement = TracePlacement(3)
    assert placed(placement, "a", 1, [4, 2, 3]) == 1
    assert placed(placement, "b", 1, [0, 2, 1]) == 0


def test_requests_that_are_not_yet_sent_count_too() -> None:
    placement = TracePlacement(3)
    assert [placed(placement, key, size, IDLE) for key, size in (("a", 5), ("b", 2), ("c", 3))] == [0, 1, 2]
    assert placed(placement, "d", 1, IDLE) == 1
    placement.remove("a")
    placement.remove("a")
    assert placed(placement, "e", 1, IDLE) == 0
