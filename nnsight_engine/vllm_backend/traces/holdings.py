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


class Holdings:
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

    Memory that several tensors share counts once, and as a whole if they are views of a part of it.
    """
    total, seen, waiting = 0, set[int](), list(values)
    while waiting:
        value = waiting.pop()
        kind = type(value)  # no code of the user's may run here, so nothing is asked of the object itself
        if issubclass(kind, torch.Tensor):
            key, size = _storage_of(value)
        elif kind in _SIZED:
            key, size = id(value), value.nbytes if kind is np.ndarray else len(value)
        else:
            key, size = id(value), 0
        if key in seen:
            continue
        seen.add(key)
        total += size
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


def _storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return which memory a tensor is in, and its bytes."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - has no public name
        if tensor.layout is not torch.strided:
            return id(tensor), 0  # does not travel
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
