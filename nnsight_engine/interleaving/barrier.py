"""Barriers: invokes wait for each other, so that one can use what another has just read.

Invokes that want the same place of the model are answered in order of definition, each until it wants
something else. An invoke that needs a value which an earlier one reads *at that same place* must be held
before it asks, and that is what a barrier does.
"""

from __future__ import annotations

from nnsight_engine.interleaving.events import Events
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.interleaving.shared_variables import meet


class Barrier:
    """Holds each block that calls it until ``participants`` have; it can be used again after that."""

    def __init__(self, interleaver: Interleaver, participants: int) -> None:
        """Make a barrier.

        Raises:
            ValueError: ``participants`` is not a positive number.
        """
        if participants < 1:
            raise ValueError(f"a barrier needs at least 1 participant, got {participants}")
        self.interleaver = interleaver
        self.participants = participants
        self.arrived: list[Mediator] = []

    def __call__(self) -> None:
        """Wait for the others.

        Raises:
            ValueError: Called outside an invoke.
            MissedProviderError: The run ended before all had come.
        """
        mediator = self.interleaver.current
        if mediator is None:
            raise ValueError("a barrier is called inside an invoke: each of its participants is one")
        mediator.ask(Events.BARRIER, "", None, self)

    def arrive(self, mediator: Mediator) -> None:
        """Hold a block; the last one to come releases all, in order of definition."""
        self.arrived.append(mediator)
        if len(self.arrived) < self.participants:
            return
        assert mediator.interleaver is not None  # noqa: S101 - it has just asked
        meet([one.exchange for one in self.arrived if one.exchange is not None])
        mediator.interleaver.released.extend(sorted(self.arrived, key=lambda one: one.idx))
        self.arrived = []

    def unmet(self) -> str:
        """Say what a block that is still held was waiting for."""
        return (
            f"Execution complete but a barrier for {self.participants} participants was reached by "
            f"{len(self.arrived)} only: call it in as many invokes as it was made for."
        )
