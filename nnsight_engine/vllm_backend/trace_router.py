"""Where what a block has saved so far meets the stream of its request's outputs.

The worker tells after each step what is new, in ``news``; here it is put together again, so that each output
of a stream can carry everything that its block has saved up to the tokens it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnsight_engine.vllm_backend.parcels import on_parcels
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY
from nnsight_engine.vllm_backend.traces.news import apply_news


class TraceRouter:
    """Keeps what the blocks of open traces have saved, by trace, block and choice."""

    def __init__(self) -> None:
        """Start with no open trace."""
        self._saves: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}

    def __len__(self) -> int:
        """Return how many traces are open."""
        return len(self._saves)

    def attach(self, output_processor: Any) -> None:
        """Take parcels out of everything that ``output_processor`` will process."""
        on_parcels(output_processor, TRACE_KEY, self._deliver)

    def open(self, key: str) -> None:
        """Keep what comes for a trace; ``close`` it in the end."""
        self._saves[key] = {}

    def close(self, key: str) -> None:
        """Forget a trace; what still arrives for it is dropped."""
        self._saves.pop(key, None)

    def saves(self, key: str, index: int, num_choices: int) -> list[dict[str, Any]]:
        """Return what each choice of a block has saved so far, by name."""
        known = self._saves.get(key, {})
        return [dict(known.get((index, choice), {})) for choice in range(num_choices)]

    def _deliver(self, parcel: Sequence[Any], choice: int) -> None:
        for key, index, data in parcel:
            if key in self._saves:
                apply_news(self._saves[key].setdefault((index, choice), {}), data)
