"""Refusing to wait for a GPU: what a step must not do while the model runs.

CUDA itself tells, where there is one. Elsewhere the operators that would wait are refused as they are
called: those that hand a tensor's numbers to Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING: Final = frozenset({"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"})


class WaitError(Exception):
    """Something would have waited for the device."""


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raise where the block would wait for the device: torch's RuntimeError on CUDA, WaitError elsewhere."""
    if device.type != "cuda":
        with _Refusing():  # type: ignore[no-untyped-call] # torch's own constructor
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func.overloadpacket.__name__ in _WAITING:
            raise WaitError(f"{func} hands numbers to Python, for which a GPU is waited for")
        return func(*args, **(kwargs or {}))
