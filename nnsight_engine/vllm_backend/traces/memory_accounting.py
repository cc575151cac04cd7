"""What a traced request holds in the worker's memory, counted so that no block fills it.

Counted are what the block has saved, and what is kept for it: values that are to be written again after a
preemption, chunks of its prompt, keys for attention patterns. What is kept is known at once. To count what is
saved is a walk over all of it, so it is done only when the block has been given so much since the last time
that it could have reached the limit, and once more when it ends. The request looks each time that the model
goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.vllm_backend.traces.errors import TraceBytesError

CACHES: Final = "caches"
"""What caches keep is counted as it comes, and comes home as saved values do."""

_MADE_OF_GIVEN: Final = 4
"""Bytes that a block is expected to save at most, for each byte that it is given."""


class MemoryAccount:
    """The bytes of one request.

    Args:
        max_bytes: Most that it may hold.
        saved: Gives what the block has saved.

    Attributes:
        saved_bytes: What that was when it was last walked through.
    """

    def __init__(self, max_bytes: int, saved: Callable[[], Iterable[Any]]) -> None:
        """Start with nothing."""
        self._max_bytes = max_bytes
        self._saved = saved
        self._kept_bytes: dict[str, int] = {}
        self.saved_bytes = 0
        self._given_bytes = 0

    def keep(self, what: str, num_bytes: int) -> None:
        """Count what is kept for the block, more of it or, negative, less."""
        self._kept_bytes[what] = self._kept_bytes.get(what, 0) + num_bytes

    def let_go(self, what: str) -> None:
        """Count nothing of what was kept."""
        self._kept_bytes.pop(what, None)

    def give(self, num_bytes: int) -> None:
        """Count what the block was given, and may save."""
        self._given_bytes += num_bytes

    @property
    def result_bytes(self) -> int:
        """Bytes of what comes home."""
        return self.saved_bytes + self._kept_bytes.get(CACHES, 0)

    def check(self, *, is_last: bool = False) -> None:
        """See whether the request holds too much.

        Raises:
            TraceBytesError: It does.
        """
        kept = sum(self._kept_bytes.values())
        if is_last or kept + self.saved_bytes + _MADE_OF_GIVEN * self._given_bytes > self._max_bytes:
            self.saved_bytes = num_bytes(self._saved())
            self._given_bytes = 0
        if kept + self.saved_bytes > self._max_bytes:
            raise TraceBytesError.holding(self.saved_bytes, kept, self._max_bytes)


def num_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of all tensors, arrays and texts in values and the containers among them.

    Memory that several tensors share counts once, and as a whole if they are views of a part of it. A tensor
    that is larger than its memory, as an expanded one is, counts as what it will be when it is written out.
    """
    total, seen, waiting = 0, set[int](), list(values)
    while waiting:
        value = waiting.pop()
        kind = type(value)  # no code of the user's may run here, so nothing is asked of the object itself
        if issubclass(kind, torch.Tensor):
            total += _tensor_bytes(value, seen)
        elif id(value) in seen:
            continue
        elif kind in _SIZED:
            total += value.nbytes if kind is np.ndarray else len(value)
        seen.add(id(value))
        for container, items in _ITEMS.items():
            if issubclass(kind, container):
                waiting.extend(items(value))
    return total


_SIZED: Final = frozenset({np.ndarray, bytes, bytearray, str})
_ITEMS: Final[dict[type, Callable[[Any], Iterable[Any]]]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    dict: dict.values,
}


def _tensor_bytes(tensor: torch.Tensor, seen: set[int]) -> int:
    """Return the bytes of a tensor that have not been counted yet, and take note of its memory."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - has no public name
        if id(tensor) in seen or tensor.is_meta:
            return 0
        if tensor.layout is not torch.strided:
            return sum(_tensor_bytes(part, seen) for part in _parts_of(tensor))
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        beyond = max(tensor.numel() * tensor.element_size() - size, 0)
        address = storage.data_ptr()
        if address in seen:
            return beyond
        seen.add(address)
        return size + beyond


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that a sparse one is made of; none of layouts that are not known."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # noqa: SLF001 - the public ones want it coalesced
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
