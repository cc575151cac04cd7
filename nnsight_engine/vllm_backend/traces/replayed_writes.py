"""Storage of a request's writes, and their replay for positions that are computed again after a preemption.

The block does not run again for them; without its writes the rebuilt keys and values would be wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from nnsight_engine.core.trees import map_pairs, map_tensors
from nnsight_engine.vllm_backend.traces.memory_accounting import num_bytes

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.request import TracedRequest

_WRITES: Final = "writes"
"""Name of the writes' account in ``MemoryAccount``."""


class ReplayedWrites:
    def __init__(self, request: TracedRequest) -> None:
        self._request = request
        self._written: dict[str, list[tuple[int, Any]]] = {}
        self._again: tuple[int, int, int] | None = None

    def begin(self, row: int, start: int, num_rows: int) -> None:
        """Begin a step that recomputes ``num_rows`` positions from ``start`` on, in rows from ``row`` on."""
        self._again = (row, start, num_rows) if num_rows else None
        for provider in self._written if num_rows else ():
            self._request.dispatcher.want(provider, self._request)

    def end(self) -> None:
        if self._again is not None:
            self._again = None
            for provider in self._written:
                self._request.release(provider)

    def clear(self) -> None:
        """Drop all writes: no position will be computed again."""
        self._written.clear()
        self._request.memory.release_account(_WRITES)

    def has_use_for(self, provider: str) -> bool:
        return self._again is not None and provider in self._written

    def put_back(self, provider: str) -> None:
        if self._again is None or provider not in self._written:
            return
        row, start, num_rows = self._again
        batcher = self._request.batcher
        value = batcher.current_value
        for position, rows in self._written[provider]:
            value = self._with(value, rows, row + position - start, start, num_rows, position)
        batcher.current_value = value

    def _with(self, value: Any, rows: Any, row: int, start: int, num_rows: int, position: int) -> Any:
        def again(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
            axis = self._request.batcher.axis(whole)
            if axis is None:
                return whole
            first = max(start - position, 0)
            length = min(part.shape[axis], start + num_rows - position) - first
            if length <= 0:
                return whole
            written = whole.clone()
            written.narrow(axis, row + first, length).copy_(part.narrow(axis, first, length))
            return written

        return map_pairs(value, rows, again)

    def note(self, provider: str) -> None:
        request, batcher = self._request, self._request.batcher
        first, num_rows = batcher.group

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            axis = batcher.axis(tensor)
            return tensor if axis is None else tensor.narrow(axis, first, num_rows).clone()

        entries = self._written.setdefault(provider, [])
        if entries and entries[-1][0] == request.start:
            request.memory.keep(_WRITES, -num_bytes([entries.pop()[1]]))
        written = map_tensors(batcher.current_value, kept)
        entries.append((request.start, written))
        request.memory.keep(_WRITES, num_bytes([written]))
