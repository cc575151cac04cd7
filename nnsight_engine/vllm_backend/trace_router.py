"""Where what blocks tell while they run meets whoever waits for it.

The worker sends along with a step's outputs what blocks have newly saved and printed. Here it is handed to
the trace's listener, just before vLLM makes the outputs that it came with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nnsight_engine.remote_backend.backpressure import MAX_BYTES, Backpressure, Drop, UnreadShare
from nnsight_engine.vllm_backend.output_payloads import on_parcels
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY

logger = logging.getLogger(__name__)


class TraceEvent(NamedTuple):
    """What a block has told after a step.

    Attributes:
        block: The block.
        choice: Which of its request's ``n``.
        news: What it has newly saved, None if nothing.
        printed: What it printed.
    """

    block: int
    choice: int
    news: bytes | None
    printed: str


class TraceRouter:
    """Knows who listens to open traces, and how much of what was told waits to be read.

    Args:
        unread: What waits, of all traces together.
    """

    def __init__(self, unread: Backpressure | None = None) -> None:
        """Start with no open trace."""
        self._unread = unread or Backpressure()
        self._listeners: dict[str, tuple[Callable[[TraceEvent], None], UnreadShare]] = {}

    def __len__(self) -> int:
        """Return how many traces are open."""
        return len(self._listeners)

    def attach(self, output_processor: Any) -> None:
        """Take parcels out of everything that ``output_processor`` will process."""
        on_parcels(output_processor, TRACE_KEY, self._deliver)

    def open(
        self, key: str, listener: Callable[[TraceEvent], None], drop: Drop, *, max_bytes: int = MAX_BYTES
    ) -> UnreadShare:
        """Hand over what comes for a trace; ``close`` it in the end.

        Args:
            key: The trace.
            listener: Takes what was told.
            drop: Lets go of what waits to be read, when that is too much.
            max_bytes: How much may wait.

        Returns:
            Where the listener says what waits and what was read.
        """
        share = self._unread.share(drop, max_bytes)
        self._listeners[key] = listener, share
        return share

    def close(self, key: str) -> None:
        """Forget a trace and what waits of it; what still arrives for it is dropped."""
        found = self._listeners.pop(key, None)
        if found is not None:
            found[1].close()

    def _deliver(self, parcel: Sequence[Any], choice: int) -> None:
        for key, index, news, printed in parcel:
            found = self._listeners.get(key)
            if found is None:
                continue
            listener, _ = found
            try:
                listener(TraceEvent(index, choice, news, printed))
            except Exception:  # vLLM's reader of outputs, whose end is the engine's, calls this
                logger.exception("what a block told could not be handed over")
