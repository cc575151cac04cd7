"""Facts about a step that every rank and stage derives alike from the scheduler's output.

Whether ranks or stages exchange messages in a step depends on these facts only. Whether a block still waits
is known to one worker, so it must not decide whether the others wait for a message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class StepFacts:
    """A step, as scheduled.

    ``bound`` are requests whose rows cannot be computed again; for ``bound_once_begun`` this holds once their
    trace has a sandbox process.
    """

    arrived: Sequence[tuple[str, Any]] = ()
    finished: Collection[str] = ()
    scheduled: Collection[str] = ()
    is_single_tenant: bool = False
    bound: Collection[str] = ()
    bound_once_begun: Collection[str] = ()


class KnownRequests:
    """The traced requests that have arrived and not ended, whether their blocks still run or not."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.sandboxed: set[str] = set()

    def note(self, facts: StepFacts) -> bool:
        """Record the requests that arrived and finished; return whether there are any."""
        gone = self.present.intersection(facts.finished)
        self.present -= gone
        self.sandboxed -= gone
        for request_id, plain in facts.arrived:
            self.present.add(request_id)
            if isinstance(plain, dict) and plain.get("sandbox_of"):
                self.sandboxed.add(request_id)
        return bool(gone or facts.arrived)
