"""Counters of an engine since its start; they only grow, and become smaller only when it was restarted."""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Final

PLAIN: Final = "plain"
GRAPH: Final = "graph"
TAP: Final = "tap"
EAGER: Final = "eager"
TIERS: Final = (PLAIN, GRAPH, TAP, EAGER)
"""How a step ran: without interventions, with those in one CUDA graph, with those at taps between compiled
pieces, or with uncompiled modules and hooks."""

SANDBOX_EVENTS: Final = ("started", "killed", "refused")
"""Sandbox events: a trace got a process, a process was killed before its end, no process was available."""

STEP_BUCKETS_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
    10.0,
)
"""Upper bounds of the histogram of seconds that interventions took in one step; the last bucket has none."""


@dataclasses.dataclass(slots=True)
class EngineCounts:
    """Counters of one engine; ``intervention_buckets`` counts steps by duration, see ``STEP_BUCKETS_S``."""

    steps: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    intervention_buckets: list[int] = dataclasses.field(
        default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1)
    )
    intervention_s: float = 0.0
    sandboxes: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SANDBOX_EVENTS, 0))

    def note_time(self, seconds: float) -> None:
        self.intervention_buckets[bisect.bisect_left(STEP_BUCKETS_S, seconds)] += 1
        self.intervention_s += seconds

    def to_plain(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> EngineCounts:
        return cls(**plain)

    @classmethod
    def total(cls, counts: Iterable[EngineCounts]) -> EngineCounts:
        total = cls()
        for one in counts:
            for name, number in one.steps.items():
                total.steps[name] += number
            for name, number in one.sandboxes.items():
                total.sandboxes[name] += number
            total.intervention_buckets = list(
                map(operator.add, total.intervention_buckets, one.intervention_buckets)
            )
            total.intervention_s += one.intervention_s
        return total


__all__ = ["EAGER", "GRAPH", "PLAIN", "SANDBOX_EVENTS", "STEP_BUCKETS_S", "TAP", "TIERS", "EngineCounts"]
