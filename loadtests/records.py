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

from loadtests.run_spec import HOSTILE, RunSpec
from loadtests.summary import Percentiles, SummaryRow


class EventKind(enum.StrEnum):
    """The kind of an event, locust's ``request_type``."""

    FIRST = "TTFT"
    """The first token was received."""
    GAP = "ITL"
    """Another token was received."""
    END = "E2E"
    """The response is complete, or failed."""
    REFUSED = "REFUSED"
    """A request of the hostile tenant was rejected, as it should be."""
    DISCONNECTED = "LEFT"
    """The hostile tenant disconnected during a request."""


_OUTCOMES: Final = (EventKind.END, EventKind.REFUSED, EventKind.DISCONNECTED)
_MAX_ERRORS: Final = 20


@dataclasses.dataclass(slots=True)
class _Counted:
    """The counts of one kind of request in one phase."""

    outcomes: collections.Counter[EventKind] = dataclasses.field(default_factory=collections.Counter)
    num_failed: int = 0
    num_tokens: int = 0
    times_ms: dict[EventKind, array[float]] = dataclasses.field(
        default_factory=lambda: {event_kind: array("d") for event_kind in EventKind}
    )


class Records:
    """Collects a run's events."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
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
        event_kind = EventKind(request_type)
        counted = self._counted[context["kind"], context["phase"]]
        if event_kind in _OUTCOMES:
            counted.outcomes[event_kind] += 1
            counted.num_tokens += context["num_tokens"]
        if exception is None:
            counted.times_ms[event_kind].append(response_time)
            return
        counted.num_failed += 1
        error = f"{context['kind']}: {exception}"
        if error in self.errors or len(self.errors) < _MAX_ERRORS:
            self.errors[error] += 1

    def rows(self) -> list[SummaryRow]:
        """Return the rows, one per kind and phase; idle phases of hostile kinds are omitted."""
        return [
            self._row(kind, phase.name, phase.share * self._spec.seconds)
            for kind in self._spec.counts
            for phase in self._spec.phases
            if phase.is_counted
            and ((kind, phase.name) in self._counted or not _is_idle(kind, is_hostile=phase.is_hostile))
        ]

    def _row(self, kind: str, phase: str, seconds: float) -> SummaryRow:
        counted = self._counted[kind, phase]
        num_requests = sum(counted.outcomes.values())
        return SummaryRow(
            kind=kind,
            phase=phase,
            seconds=seconds,
            num_requests=num_requests,
            num_refused=counted.outcomes[EventKind.REFUSED],
            num_left=counted.outcomes[EventKind.DISCONNECTED],
            num_failed=counted.num_failed,
            error_share=counted.num_failed / num_requests if num_requests else 0.0,
            num_tokens=counted.num_tokens,
            requests_per_s=num_requests / seconds,
            tokens_per_s=counted.num_tokens / seconds,
            ttft_ms=percentiles(counted.times_ms[EventKind.FIRST]),
            itl_ms=percentiles(counted.times_ms[EventKind.GAP]),
            e2e_ms=percentiles(counted.times_ms[EventKind.END]),
        )


def _is_idle(kind: str, *, is_hostile: bool) -> bool:
    return kind in HOSTILE and not is_hostile


def percentiles(times: array[float]) -> Percentiles | None:
    """Return the percentiles, or None if there are no times."""
    if not times:
        return None
    if len(times) == 1:
        return Percentiles(num=1, p50=times[0], p95=times[0], p99=times[0])
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return Percentiles(num=len(times), p50=cuts[49], p95=cuts[94], p99=cuts[98])


__all__ = ["EventKind", "Records", "percentiles"]
