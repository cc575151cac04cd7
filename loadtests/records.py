"""Collects locust's request events of a run and computes its table.

Locust's own statistics round times to two digits, so the summary is computed separately. A request belongs to
the phase in which it began: a rate is the number of requests of a phase divided by its duration.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import statistics
from array import array
from typing import Any, Final

from loadtests.asked import HOSTILE, Asked
from loadtests.summary import Percentiles, Row


class Told(enum.StrEnum):
    """The kind of an event, locust's ``request_type``."""

    FIRST = "TTFT"
    """The first token was received."""
    GAP = "ITL"
    """Another token was received."""
    END = "E2E"
    """The response is complete, or failed."""
    REFUSED = "REFUSED"
    """A request of the hostile tenant was rejected, as it should be."""
    LEFT = "LEFT"
    """The hostile tenant disconnected during a request."""


_OUTCOMES: Final = (Told.END, Told.REFUSED, Told.LEFT)
_MOST_ERRORS: Final = 20


@dataclasses.dataclass(slots=True)
class _Counted:
    """The counts of one kind of request in one phase."""

    outcomes: collections.Counter[Told] = dataclasses.field(default_factory=collections.Counter)
    num_failed: int = 0
    num_tokens: int = 0
    times_ms: dict[Told, array[float]] = dataclasses.field(
        default_factory=lambda: {told: array("d") for told in Told}
    )


class Records:
    """Collects a run's events."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._counted: dict[tuple[str, str], _Counted] = collections.defaultdict(_Counted)
        self.errors: collections.Counter[str] = collections.Counter()

    def take(
        self,
        request_type: str,
        response_time: float,
        context: dict[str, Any],
        exception: BaseException | None = None,
        **_rest: object,
    ) -> None:
        """Record one event; a listener of locust's request event."""
        told = Told(request_type)
        counted = self._counted[context["kind"], context["phase"]]
        if told in _OUTCOMES:
            counted.outcomes[told] += 1
            counted.num_tokens += context["num_tokens"]
        if exception is None:
            counted.times_ms[told].append(response_time)
            return
        counted.num_failed += 1
        error = f"{context['kind']}: {exception}"
        if error in self.errors or len(self.errors) < _MOST_ERRORS:
            self.errors[error] += 1

    def rows(self) -> list[Row]:
        """Return the rows, one per kind and phase; idle phases of hostile kinds are omitted."""
        return [
            self._row(kind, phase.name, phase.share * self._asked.seconds)
            for kind in self._asked.counts
            for phase in self._asked.phases
            if phase.is_counted
            and ((kind, phase.name) in self._counted or not _rests(kind, is_hostile=phase.is_hostile))
        ]

    def _row(self, kind: str, phase: str, seconds: float) -> Row:
        counted = self._counted[kind, phase]
        num_requests = sum(counted.outcomes.values())
        return Row(
            kind=kind,
            phase=phase,
            seconds=seconds,
            num_requests=num_requests,
            num_refused=counted.outcomes[Told.REFUSED],
            num_left=counted.outcomes[Told.LEFT],
            num_failed=counted.num_failed,
            error_share=counted.num_failed / num_requests if num_requests else 0.0,
            num_tokens=counted.num_tokens,
            requests_per_s=num_requests / seconds,
            tokens_per_s=counted.num_tokens / seconds,
            ttft_ms=percentiles(counted.times_ms[Told.FIRST]),
            itl_ms=percentiles(counted.times_ms[Told.GAP]),
            e2e_ms=percentiles(counted.times_ms[Told.END]),
        )


def _rests(kind: str, *, is_hostile: bool) -> bool:
    return kind in HOSTILE and not is_hostile


def percentiles(times: array[float]) -> Percentiles | None:
    """Return the percentiles, or None if there are no times."""
    if not times:
        return None
    if len(times) == 1:
        return Percentiles(num=1, p50=times[0], p95=times[0], p99=times[0])
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return Percentiles(num=len(times), p50=cuts[49], p95=cuts[94], p99=cuts[98])


__all__ = ["Records", "Told", "percentiles"]
