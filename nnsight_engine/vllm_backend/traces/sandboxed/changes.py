"""Storage of a sandbox process's changes in a step, for the case that the step is run again.

The process is asked only once, and the size of its answers is up to the untrusted code. So no more is stored
than one message may hold, and a step in which more was changed cannot be run again.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnsight_engine.vllm_backend.traces.messages import ValueSlot


class Changes:
    """The changes of one step, by place.

    Args:
        max_bytes: Limit for the stored changes.

    Attributes:
        by_place: Slots, and the bytes of their tensors.
        is_too_much: Whether the changes cannot be stored, because they exceed the limit or a place was
            reached twice; then none is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self.by_place: dict[str, tuple[Sequence[ValueSlot], memoryview]] = {}
        self.is_too_much = False
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def keep(self, place: str, slots: Sequence[ValueSlot], content: memoryview) -> None:
        """Store the changes at a place, unless they exceed the limit or the place was reached before."""
        self._num_bytes += len(content)
        self.is_too_much = self.is_too_much or self._num_bytes > self._max_bytes or place in self.by_place
        if self.is_too_much:
            self.by_place.clear()
        else:
            self.by_place[place] = (slots, content)

    def clear(self) -> None:
        """Drop all changes: the step has ended."""
        self.by_place.clear()
        self.is_too_much, self._num_bytes = False, 0
