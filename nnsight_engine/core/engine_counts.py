"""What an engine has counted since it started: steps by how they ran, time of interventions, sandboxes.

A worker counts and tells it when asked, as plain values; whoever asks again gets larger numbers, or smaller
ones where the engine was started again in between.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

TIERS: Final = ("plain", "tap", "eager")
"""How a step ran: without interventions, with them at taps, with the model's modules called one by one."""

SANDBOX_EVENTS: Final = ("started", "killed", "refused")
"""What happens to sandboxes: a trace got a process, one was ended before its time, there was none."""

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
"""Bounds by which seconds of interventions within one step are counted; the last bucket has no bound."""


@dataclasses.dataclass(slots=True)
class EngineCounts:
    """Counts of one engine.

    Attributes:
        steps: By tier.
        intervention_buckets: Steps with interventions by the seconds that these took, see ``STEP_BUCKETS_S``.
        intervention_s: Those seconds together.
        sandboxes: What happened to sandboxes, by event.
    """

    steps: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    intervention_buckets: list[int] = dataclasses.field(
        default_factory=lambda: [0] * (len(STEP_BUCKETS_S) + 1)
    )
    intervention_s: float = 0.0
    sandboxes: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SANDBOX_EVENTS, 0))

    def note_time(self, seconds: float) -> None:
        """Count what interventions took in one step."""
        self.intervention_buckets[bisect.bisect_left(STEP_BUCKETS_S, seconds)] += 1
        self.intervention_s += seconds

    def to_plain(self) -> dict[str, Any]:
        """Return them as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> EngineCounts:
        """Return what ``to_plain`` returned."""
        return cls(**plain)


__all__ = ["SANDBOX_EVENTS", "STEP_BUCKETS_S", "TIERS", "EngineCounts"]
