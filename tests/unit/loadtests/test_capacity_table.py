"""The table of capacity: who is under a load, what counts, and the line through the plain points."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.machine import Machine
from loadtests.capacity_table import LOADS, CapacityPoint, counts_of, page, point_of, step_of
from loadtests.run_process import RunError
from loadtests.summary import Percentiles, Summary, SummaryRow

MACHINE = Machine("2026-11-23", "abc", "a processor", 2, 0.0, {"python": "3.11"})


def times(middle: float) -> Percentiles:
    return Percentiles(num=9, p50=middle, p95=2 * middle, p99=3 * middle)


def row(kind: str, phase: str = "measured", **rest: Any) -> SummaryRow:
    counts = {"num_requests": 5, "num_refused": 0, "num_left": 0, "num_failed": 0, "error_share": 0.0}
    rates = {"num_tokens": 50, "requests_per_s": 0.5, "tokens_per_s": 5.0}
    return SummaryRow(kind=kind, phase=phase, seconds=10, **{**counts, **rates, **rest})


def summary(*rows: SummaryRow) -> Summary:
    return Summary(
        scenario="",
        shape="",
        url="",
        model="m",
        seconds=10,
        users=1,
        client_cpu=0.1,
        rows=list(rows),
        errors={},
    )


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("concurrency", [2, 4, 8, 32])
def test_as_many_users_as_are_concurrent_and_half_of_them_plain_in_a_mixed_load(
    load: str, concurrency: int
) -> None:
    counts = counts_of(load, concurrency)
    assert sum(counts.values()) == concurrency
    assert counts["plain"] == (concurrency if load == "plain" else concurrency // 2)


def test_a_point_has_everybodys_rates_and_the_plain_ones_times_after_the_warm_up() -> None:
    plain = row("plain", ttft_ms=times(40), itl_ms=times(20))
    found = point_of(
        "mixed", 2, summary(row("plain", "warm-up", itl_ms=times(1)), plain, row("lens", num_failed=1))
    )
    assert (found.requests_per_s, found.tokens_per_s, found.num_failed) == (1.0, 10.0, 1)
    assert (found.ttft_ms.p50, found.itl_ms.p99) == (40, 60)


def test_a_run_without_an_answer_is_no_point() -> None:
    with pytest.raises(RunError, match="no plain request was answered"):
        point_of(
            "plain", 2, summary(row("plain"), row("plain", "warm-up", itl_ms=times(1), ttft_ms=times(1)))
        )


def point(load: str, concurrency: int, step: float) -> CapacityPoint:
    return CapacityPoint(
        load=load, concurrency=concurrency, requests_per_s=1, tokens_per_s=30, num_failed=0,
        ttft_ms=times(50), itl_ms=times(step), client_cpu=0.05,
    )  # fmt: skip


def test_the_step_is_a_line_through_the_plain_points() -> None:
    points = [point("plain", 1, 12), point("plain", 8, 26), point("mixed", 8, 999)]
    assert step_of(points) == pytest.approx((10, 2))
    assert step_of(points[1:]) is None
    text = page(MACHINE, points)
    assert "| mixed | 8 | 1.00 | 30.0 | 0 | 50.0 |" in text
    assert "10.0 ms + 2.00 ms a request" in text
