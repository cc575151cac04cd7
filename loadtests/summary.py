"""The result of a run, as JSON for programs and as a table for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of times in milliseconds.

    Attributes:
        num: The number of times.
        p50: The median.
        p95: The 95th percentile.
        p99: The 99th percentile.
    """

    num: int
    p50: float
    p95: float
    p99: float


class SummaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one kind of request in one phase.

    Attributes:
        kind: The kind of request.
        phase: The name of the phase.
        seconds: The duration of the phase.
        num_requests: Requests that began in the phase and ended.
        num_refused: Requests of the hostile tenant that were rejected, which is not an error.
        num_left: Requests from which the hostile tenant disconnected, which is not an error either.
        num_failed: Requests that failed: rejected, interrupted, or with an incomplete response.
        error_share: The fraction of requests that failed.
        num_tokens: Generated tokens.
        requests_per_s: Requests per second of the phase.
        tokens_per_s: Tokens per second of the phase.
        ttft_ms: The time to first token.
        itl_ms: The time between two events with tokens.
        e2e_ms: The time from a request to the end of its response, of requests that did not fail.
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
        """Return a measure by its name in thresholds, such as ``ttft_p95``; None if it has no value.

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
    """The result of one threshold.

    Attributes:
        rule: The threshold in words.
        value: The measured value; None if there is none, which counts as missed.
        is_kept: Whether the threshold was met.
    """

    rule: str
    value: float | None
    is_kept: bool


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run.

    Attributes:
        scenario: The name of the scenario.
        shape: The name of the shape.
        url: The server's address.
        model: The server's model.
        seconds: The duration.
        users: The number of users, before a phase multiplies them.
        client_cpu: The fraction of one core that the sending process used; near 1 the sender was the
            bottleneck.
        rows: The table.
        errors: Error messages with their numbers of occurrences.
        crashes: Errors of the users' own code, which invalidate the run.
        machine: The machine that sent the requests.
        verdicts: The results of the thresholds.
    """

    scenario: str
    shape: str
    url: str
    model: str
    seconds: float
    users: int
    client_cpu: float
    rows: list[SummaryRow]
    errors: dict[str, int]
    crashes: list[str] = []
    machine: dict[str, Any] = {}
    verdicts: list[Verdict] = []

    @property
    def is_kept(self) -> bool:
        """Whether the run is valid and every threshold was met."""
        return not self.crashes and all(verdict.is_kept for verdict in self.verdicts)

    def row(self, kind: str, phase: str) -> SummaryRow | None:
        """Return a row, or None if there is none."""
        return next((row for row in self.rows if (row.kind, row.phase) == (kind, phase)), None)


HEAD: Final = (
    "requests", "phase", "number", "failed", "refused", "left", "requests/s", "tokens/s",
    "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99", "E2E p50", "p95", "p99",
)  # fmt: skip
"""The columns of the table; times are in milliseconds."""


def cells(row: SummaryRow) -> list[str]:
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
    """Return the three cells of the percentiles; short times get a decimal digit."""
    if times is None:
        return ("", "", "")
    return [f"{one:.1f}" if one < _SHORT_MS else f"{one:.0f}" for one in (times.p50, times.p95, times.p99)]


def read(path: Path, kind: type[T]) -> T:
    """Decode a JSON file.

    Raises:
        OSError: It cannot be read.
        msgspec.DecodeError: It has other content.
    """
    return msgspec.json.decode(path.read_bytes(), type=kind)


def write(path: Path, value: msgspec.Struct) -> None:
    """Write a JSON file, indented for people."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


_SHORT_MS: Final = 100.0

__all__ = [
    "ALL_MEASURES",
    "HEAD",
    "Percentiles",
    "Summary",
    "SummaryRow",
    "Verdict",
    "cells",
    "read",
    "times_cells",
    "write",
]
