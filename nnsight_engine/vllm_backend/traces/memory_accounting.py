"""Accounting of the worker memory that a traced request holds, so that no block can exhaust it.

Saved values count, and data retained for the block (writes to replay, chunks, keys for patterns). Measuring
saved values takes a walk over all of them, so it is done only when the block has received enough data since
the last walk that it could have reached the limit, and when it ends. The check runs each time that the model
continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.vllm_backend.traces.errors import TraceBytesError

CACHES: Final = "caches"
"""The account of values in caches: counted on arrival, and part of the result as saved values are."""

_MADE_OF_GIVEN: Final = 4
"""Assumed maximum of bytes that a block saves per byte that it is given."""


class MemoryAccount:
    """The memory account of one request; ``saved`` returns the values that its block has saved so far.

    ``saved_bytes`` is their size at the last walk.
    """

    def __init__(self, max_bytes: int, saved: Callable[[], Iterable[Any]]) -> None:
        self._max_bytes = max_bytes
        self._saved = saved
        self._kept_bytes: dict[str, int] = {}
        self.saved_bytes = 0
        self._given_bytes = 0  # since the last walk over the saved values

    def keep(self, account: str, num_bytes: int) -> None:
        """Add to the retained bytes of an account; a negative number subtracts."""
        self._kept_bytes[account] = self._kept_bytes.get(account, 0) + num_bytes

    def release_account(self, account: str) -> None:
        self._kept_bytes.pop(account, None)

    def count_given(self, num_bytes: int) -> None:
        """Count bytes that the block was given and may save."""
        self._given_bytes += num_bytes

    @property
    def result_bytes(self) -> int:
        return self.saved_bytes + self._kept_bytes.get(CACHES, 0)

    def check(self, *, is_last: bool = False) -> None:
        """Raise TraceBytesError if the request holds too much.

        Saved values are measured only if they could exceed the limit, or if ``is_last``.
        """
        kept_bytes = sum(self._kept_bytes.values())
        if is_last or kept_bytes + self.saved_bytes + _MADE_OF_GIVEN * self._given_bytes > self._max_bytes:
            self.saved_bytes = num_bytes(self._saved())
            self._given_bytes = 0
        if kept_bytes + self.saved_bytes > self._max_bytes:
            raise TraceBytesError.holding(self.saved_bytes, kept_bytes, self._max_bytes)


def num_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of all tensors, arrays, byte strings and strings in values and nested containers.

    Shared memory counts once, and in full even if a tensor is a view of a part of it. A tensor larger than
    its storage, such as an expanded one, counts with its serialized size.
    """
    total, seen, waiting = 0, set[int](), list(values)
    while waiting:
        value = waiting.pop()
        kind = type(value)  # no user code may run here, so no method of the object is called
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
    """Return a tensor's bytes that are not counted yet; ``seen`` has ids and addresses of counted ones."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - has no public name
        if id(tensor) in seen or tensor.is_meta:
            return 0
        if tensor.layout is not torch.strided:
            return sum(_tensor_bytes(part, seen) for part in _parts_of(tensor))
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        beyond = max(tensor.numel() * tensor.element_size() - size, 0)  # of an expanded tensor
        address = storage.data_ptr()
        if address in seen:
            return beyond
        seen.add(address)
        return size + beyond


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors of a sparse tensor; an empty list for unknown layouts."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # noqa: SLF001 - the public ones want it coalesced
    if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
