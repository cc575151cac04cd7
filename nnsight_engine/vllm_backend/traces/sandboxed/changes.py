"""What a sandboxed process has changed in a step, kept should the step be run again.

The process is asked once, and what it answers is as long as it likes: so not more is kept than one message
may have, and whoever has changed more cannot have its step run again.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnsight_engine.vllm_backend.traces.sandboxed.messages import ValueSlot


class Changes:
    """The changes of one step, by place.

    Args:
        max_bytes: The most that is kept.

    Attributes:
        by_place: Slots, and the bytes of their tensors.
        is_too_much: Whether more was changed than can be kept; then nothing is.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start with none."""
        self.by_place: dict[str, tuple[Sequence[ValueSlot], memoryview]] = {}
        self.is_too_much = False
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def keep(self, place: str, slots: Sequence[ValueSlot], content: memoryview) -> None:
        """Keep what was changed at a place, unless it is too much, or the place was come to before."""
        self._num_bytes += len(content)
        self.is_too_much = self.is_too_much or self._num_bytes > self._max_bytes or place in self.by_place
        if self.is_too_much:
            self.by_place.clear()
        else:
            self.by_place[place] = (slots, content)

    def clear(self) -> None:
        """The step is over."""
        self.by_place.clear()
        self.is_too_much, self._num_bytes = False, 0
