"""What a run found, as JSON for programs and as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of times in milliseconds.

    Attributes:
        num: How many there were.
        p50: The median.
        p95: 95 of 100 are at most this.
        p99: 99 of 100 are.
    """

    num: int
    p50: float
    p95: float
    p99: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request in one phase.

    Attributes:
        kind: What was asked.
        phase: When.
        seconds: How long the phase was.
        num_requests: Requests that began in it and came to an end.
        num_refused: Those of the hostile tenant's that were refused, which is no error.
        num_left: Those that the hostile tenant left, which is none either.
        num_failed: Those that failed: refused, broken off, or answered with less than was asked for.
        error_share: Those by all.
        num_tokens: Tokens generated.
        requests_per_s: Requests by the phase's length.
        tokens_per_s: Tokens by it.
        ttft_ms: From a request to its first token.
        itl_ms: Between two events with tokens.
        e2e_ms: From a request to the end of its answer, of those that did not fail.
    """

    kind: str
    phase: str
    seconds: float
    num_requests: int
    num_refused: int
    num_left: int
    num_failed: int
    error_share: float
    num_tokens: int
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: Percentiles | None = None
    itl_ms: Percentiles | None = None
    e2e_ms: Percentiles | None = None

    def measure(self, name: str) -> float | None:
        """Return a number by the name that thresholds have for it, ``ttft_p95``; None where there is none.

        Raises:
            ValueError: There is no such measure.
        """
        if name in MEASURES:
            return float(getattr(self, name))
        family, _, percentile = name.partition("_")
        if family not in _TIMES or percentile not in _PERCENTILES:
            raise ValueError(f"a measure is one of {', '.join(ALL_MEASURES)}, got {name!r}")
        times: Percentiles | None = getattr(self, f"{family}_ms")
        return None if times is None else float(getattr(times, percentile))


MEASURES: Final = ("error_share", "requests_per_s", "tokens_per_s")
_TIMES: Final = ("ttft", "itl", "e2e")
_PERCENTILES: Final = ("p50", "p95", "p99")
ALL_MEASURES: Final = (*MEASURES, *(f"{time}_{part}" for time in _TIMES for part in _PERCENTILES))


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one threshold.

    Attributes:
        rule: The threshold in words.
        value: What was found; None where there is no number, which is a miss.
        is_kept: Whether it was kept.
    """

    rule: str
    value: float | None
    is_kept: bool


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        scenario: What was sent.
        shape: How much of it when.
        url: The server.
        model: Its model.
        seconds: How long it took.
        users: How many users there were, where a phase did not multiply them.
        client_cpu: The part of one core's time that the sending process took; near 1 it measured itself.
        rows: The table.
        errors: Messages of what failed, with how often.
        crashes: Messages of users that failed by a mistake of their own: the run is worth nothing.
        machine: Where it was sent from.
        verdicts: What became of thresholds.
    """

    scenario: str
    shape: str
    url: str
    model: str
    seconds: float
    users: int
    client_cpu: float
    rows: list[Row]
    errors: dict[str, int]
    crashes: list[str] = []
    machine: dict[str, Any] = {}
    verdicts: list[Verdict] = []

    @property
    def is_kept(self) -> bool:
        """Whether the run was whole, and every threshold was kept."""
        return not self.crashes and all(verdict.is_kept for verdict in self.verdicts)

    def row(self, kind: str, phase: str) -> Row | None:
        """Return a row, or None where there is none."""
        return next((row for row in self.rows if (row.kind, row.phase) == (kind, phase)), None)


HEAD: Final = (
    "requests", "phase", "number", "failed", "refused", "left", "requests/s", "tokens/s",
    "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99", "E2E p50", "p95", "p99",
)  # fmt: skip
"""Columns of the table; times are milliseconds."""


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    number: Callable[[float], str] = "{:.1f}".format
    counts = [row.num_requests, row.num_failed, row.num_refused, row.num_left]
    return [
        row.kind,
        row.phase,
        *map(str, counts),
        number(row.requests_per_s),
        number(row.tokens_per_s),
        *(text for times in (row.ttft_ms, row.itl_ms, row.e2e_ms) for text in times_cells(times)),
    ]


def times_cells(times: Percentiles | None) -> Sequence[str]:
    """Return the three cells of times; short ones have a digit more."""
    if times is None:
        return ("", "", "")
    return [f"{one:.1f}" if one < _SHORT_MS else f"{one:.0f}" for one in (times.p50, times.p95, times.p99)]


def read(path: Path, kind: type[T]) -> T:
    """Return what a file of JSON holds.

    Raises:
        OSError: It cannot be read.
        msgspec.DecodeError: It holds something else.
    """
    return msgspec.json.decode(path.read_bytes(), type=kind)


def write(path: Path, value: msgspec.Struct) -> None:
    """Write a file of JSON, for people to look into as well."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


_SHORT_MS: Final = 100.0

__all__ = [
    "ALL_MEASURES",
    "HEAD",
    "Percentiles",
    "Row",
    "Summary",
    "Verdict",
    "cells",
    "read",
    "times_cells",
    "write",
]
