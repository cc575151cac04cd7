"""Where what blocks tell while they run meets whoever waits for it.

The worker sends along with a step's outputs what blocks have newly saved and printed. Here it is handed to
the trace's listener, just before vLLM makes the outputs that it came with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nnsight_engine.vllm_backend.parcels import on_parcels
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY

logger = logging.getLogger(__name__)


class Told(NamedTuple):
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
    """Knows who listens to open traces."""

    def __init__(self) -> None:
        """Start with no open trace."""
        self._listeners: dict[str, Callable[[Told], None]] = {}

    def __len__(self) -> int:
        """Return how many traces are open."""
        return len(self._listeners)

    def attach(self, output_processor: Any) -> None:
        """Take parcels out of everything that ``output_processor`` will process."""
        on_parcels(output_processor, TRACE_KEY, self._deliver)

    def open(self, key: str, listener: Callable[[Told], None]) -> None:
        """Hand over what comes for a trace; ``close`` it in the end."""
        self._listeners[key] = listener

    def close(self, key: str) -> None:
        """Forget a trace; what still arrives for it is dropped."""
        self._listeners.pop(key, None)

    def _deliver(self, parcel: Sequence[Any], choice: int) -> None:
        for key, index, news, printed in parcel:
            listener = self._listeners.get(key)
            if listener is None:
                continue
            try:
                listener(Told(index, choice, news, printed))
            except Exception:  # vLLM's reader of outputs, whose end is the engine's, calls this
                logger.exception("what a block told could not be handed over")
