"""Barriers between invokes, so that one invoke can use a value that another has just read.

Invokes that wait for the same point are answered in order of definition. One that uses a value which an
earlier one reads *at that same point* would evaluate its request before; a barrier blocks it until then.
"""

from __future__ import annotations

from nnsight_engine.interleaving.events import Events
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.interleaving.shared_variables import meet


class Barrier:
    """Blocks each invoke that calls it until ``participants`` invokes have called it; reusable."""

    def __init__(self, interleaver: Interleaver, participants: int) -> None:
        if participants < 1:
            raise ValueError(f"a barrier needs at least 1 participant, got {participants}")
        self.interleaver = interleaver
        self.participants = participants
        self.arrived: list[Mediator] = []

    def __call__(self) -> None:
        """Wait for the others; ValueError outside an invoke, MissedProviderError if the run ends before."""
        mediator = self.interleaver.current
        if mediator is None:
            raise ValueError("a barrier is called inside an invoke: each of its participants is one")
        mediator.send_event(Events.BARRIER, "", None, self)

    def arrive(self, mediator: Mediator) -> None:
        """Block a mediator; the last one to arrive releases all, in order of definition."""
        self.arrived.append(mediator)
        if len(self.arrived) < self.participants:
            return
        assert mediator.interleaver is not None  # noqa: S101 - it has just asked
        meet([arrived.exchange for arrived in self.arrived if arrived.exchange is not None])
        mediator.interleaver.released.extend(sorted(self.arrived, key=lambda arrived: arrived.idx))
        self.arrived = []

    def unmet(self) -> str:
        return (
            f"Execution complete but a barrier for {self.participants} participants was reached by "
            f"{len(self.arrived)} only: call it in {self.participants} invokes."
        )
