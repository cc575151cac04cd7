"""The table of ``loadtests.capacity``: measurements by load and concurrency, and the duration of a step."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from benchmarks.files import table_lines
from benchmarks.machine import Machine, machine_lines
from loadtests.run_process import RunError
from loadtests.run_spec import PLAIN, LoadPhase
from loadtests.summary import Percentiles, Summary, times_cells

LOADS: Final = ("plain", "mixed", "one-tenant")
"""Plain requests alone; beside others of three tenants; beside others of the same tenant, so without fair
shares.
"""

_MEASURED: Final = "measured"
PHASES: Final = (
    LoadPhase(name="warm-up", share=0.25, is_counted=False),
    LoadPhase(name=_MEASURED, share=0.75),
)
"""The phases of each run; requests that begin in the first one are not counted."""

_OTHERS: Final = ("steered-different", "lens", "steered-same", "capture")


class CapacityPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.

    Attributes:
        load: One of ``LOADS``.
        concurrency: The number of concurrent requests.
        requests_per_s: The rate of requests of all kinds.
        tokens_per_s: The rate of generated tokens of all kinds.
        num_failed: The number of failed requests, which should be 0.
        ttft_ms: The time to first token of plain requests, which are the neighbours under a mixed load.
        itl_ms: The inter-token latency of the same.
        client_cpu: The fraction of one core that the sender used, on the same machine.
    """

    load: str
    concurrency: int
    requests_per_s: float
    tokens_per_s: float
    num_failed: int
    ttft_ms: Percentiles
    itl_ms: Percentiles
    client_cpu: float


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """A table of measurements."""

    machine: dict[str, Any]
    points: list[CapacityPoint]


def counts_of(load: str, concurrency: int) -> dict[str, int]:
    """Return the number of users per kind under a load."""
    if load == "plain":
        return {PLAIN: concurrency}
    others = list(itertools.islice(itertools.cycle(_OTHERS), concurrency // 2))
    return {PLAIN: concurrency - len(others), **{kind: others.count(kind) for kind in others}}


def point_of(load: str, concurrency: int, summary: Summary) -> CapacityPoint:
    """Return the measurement of a run.

    Raises:
        RunError: No plain request was completed.
    """
    rows = [row for row in summary.rows if row.phase == _MEASURED]
    plain = summary.row(PLAIN, _MEASURED)
    if summary.crashes or plain is None or plain.ttft_ms is None or plain.itl_ms is None:
        raise RunError(f"no plain request was answered in {summary.seconds:.0f} s: {summary.errors}")
    return CapacityPoint(
        load=load,
        concurrency=concurrency,
        requests_per_s=sum(row.requests_per_s for row in rows),
        tokens_per_s=sum(row.tokens_per_s for row in rows),
        num_failed=sum(row.num_failed for row in rows),
        ttft_ms=plain.ttft_ms,
        itl_ms=plain.itl_ms,
        client_cpu=summary.client_cpu,
    )


def step_of(points: Sequence[CapacityPoint]) -> tuple[float, float] | None:
    """Return the duration of a step by least squares: a constant, and an increment per request, in ms.

    None if there are plain points at fewer than two concurrencies.
    """
    plain = [point for point in points if point.load == "plain"]
    if len({point.concurrency for point in plain}) < 2:
        return None
    line = statistics.linear_regression(
        [point.concurrency for point in plain], [point.itl_ms.p50 for point in plain]
    )
    return line.intercept, line.slope


def page(machine: Machine, points: Sequence[CapacityPoint]) -> str:
    """Return the table as markdown."""
    head = (
        "load", "concurrent", "requests/s", "tokens/s", "failed",
        "TTFT p50, ms", "p95", "p99", "ITL p50, ms", "p95", "p99", "sender's CPU",
    )  # fmt: skip
    lines = [*machine_lines(machine, "Capacity"), "", _METHOD, "", *table_lines(head, map(cells, points))]
    step = step_of(points)
    if step is not None:
        lines += [
            "",
            f"A step of the plain load, by least squares: {step[0]:.1f} ms + {step[1]:.2f} ms a request.",
        ]
    return "\n".join(lines) + "\n"


def cells(point: CapacityPoint) -> list[str]:
    """Return a row of the table."""
    return [
        point.load,
        str(point.concurrency),
        f"{point.requests_per_s:.2f}",
        f"{point.tokens_per_s:.1f}",
        str(point.num_failed),
        *times_cells(point.ttft_ms),
        *times_cells(point.itl_ms),
        f"{point.client_cpu:.0%}",
    ]


_METHOD: Final = """\
Created by `python -m loadtests.capacity`: the server with its defaults, and one sending process on the same
cores. Prompts have 32 tokens, answers 16 to 48. Each concurrent user sends one request after another without
a pause; rates and times are of requests that began after the first quarter of a run. Under the mixed load
half of the users are plain, and the times are of their requests; the others steer (by one vector, or by a new
one each), read the lens of all layers, and capture the prompt."""

__all__ = [
    "LOADS",
    "PHASES",
    "Capacity",
    "CapacityPoint",
    "cells",
    "counts_of",
    "page",
    "point_of",
    "step_of",
]
