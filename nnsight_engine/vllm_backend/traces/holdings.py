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

_MADE_OF_GIVEN: Final = 4
"""Bytes that a block is expected to save at most, for each byte that it is given."""


class Holdings:
    """The bytes of one request.

    Args:
        max_bytes: Most that it may hold.
        saved: Gives what the block has saved.
    """

    def __init__(self, max_bytes: int, saved: Callable[[], Iterable[Any]]) -> None:
        """Start with nothing."""
        self._max_bytes = max_bytes
        self._saved = saved
        self._kept_bytes: dict[str, int] = {}
        self._saved_bytes = 0
        self._given_bytes = 0

    def keep(self, what: str, num_bytes: int) -> None:
        """Count what is kept for the block, more of it or, negative, less."""
        self._kept_bytes[what] = self._kept_bytes.get(what, 0) + num_bytes

    def give(self, num_bytes: int) -> None:
        """Count what the block was given, and may save."""
        self._given_bytes += num_bytes

    def check(self, *, is_last: bool = False) -> None:
        """See whether the request holds too much.

        Raises:
            TraceBytesError: It does.
        """
        kept = sum(self._kept_bytes.values())
        if is_last or kept + self._saved_bytes + _MADE_OF_GIVEN * self._given_bytes > self._max_bytes:
            self._saved_bytes = num_bytes(self._saved())
            self._given_bytes = 0
        if kept + self._saved_bytes > self._max_bytes:
            raise TraceBytesError.holding(self._saved_bytes, kept, self._max_bytes)


def num_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of all tensors, arrays and texts in values and the containers among them.

    Memory that several tensors share counts once, and as a whole if they are views of a part of it.
    """
    total, seen, waiting = 0, set[int](), list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key, size = storage.data_ptr(), storage.nbytes()
        elif isinstance(value, np.ndarray):
            key, size = id(value), value.nbytes
        elif isinstance(value, bytes | str):
            key, size = id(value), len(value)
        elif isinstance(value, list | tuple | set | frozenset | dict):
            key, size = id(value), 0
        else:
            continue
        if key in seen:
            continue
        seen.add(key)
        total += size
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            waiting.extend(value)
    return total
