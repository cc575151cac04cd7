"""Storage of a sandbox process's changes in a step, for the case that the step is run again.

The process is asked only once, and the size of its answers is up to the untrusted code. So no more is stored
than one message may hold, and a step in which more was changed cannot be run again.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnsight_engine.vllm_backend.traces.messages import ValueSlot


class Changes:
    """Slots and bytes by place; none are kept (``is_too_much``) over the limit or after a repeated place."""

    def __init__(self, max_bytes: int) -> None:
        self.by_place: dict[str, tuple[Sequence[ValueSlot], memoryview]] = {}
        self.is_too_much = False
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def keep(self, place: str, slots: Sequence[ValueSlot], content: memoryview) -> None:
        self._num_bytes += len(content)
        self.is_too_much = self.is_too_much or self._num_bytes > self._max_bytes or place in self.by_place
        if self.is_too_much:
            self.by_place.clear()
        else:
            self.by_place[place] = (slots, content)

    def clear(self) -> None:
        self.by_place.clear()
        self.is_too_much, self._num_bytes = False, 0
