"""Detects what the blocks of a trace have left behind in their process, for the next trace of the tenant.

A process with leftovers (another default dtype, a replaced function of torch) is not used again. A hostile
block can deceive this, and then disturbs its own tenant only, as a process is never given to another one.
"""

from __future__ import annotations

import operator
import random
import sys
import warnings
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nnsight_engine.sandbox.block_checker import MODULES

_CLASSES: Final = (torch.Tensor, torch.nn.Module)


class Leftovers:
    """Compares the state that blocks can reach with what it was when this object was made."""

    def __init__(self) -> None:
        self._names = [name for name in ("builtins", *MODULES) if name in sys.modules]
        self._before = [dict(namespace) for namespace in self._namespaces()]
        self._settings = _settings()

    def exist(self) -> bool:
        if self._settings != _settings():
            return True
        pairs = zip(self._before, self._namespaces(), strict=True)
        return not all(
            len(before) == len(now) and all(map(operator.is_, before.values(), now.values()))
            for before, now in pairs
        )

    def _namespaces(self) -> list[Any]:
        return [vars(owner) for owner in (*(sys.modules[name] for name in self._names), *_CLASSES)]

    @staticmethod
    def draw_anew() -> None:
        """Seed the generators that traces share; torch's is seeded for each block."""
        random.seed()
        np.random.seed()  # the state of old code, which has no generator of its own


def thread_settings() -> tuple[Any, ...]:
    """Return the settings that torch and numpy have for the calling thread only."""
    return (
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_function_stack(),  # noqa: SLF001 - there is no public way to count them
        len(_get_current_dispatch_mode_stack()),
        np.geterr(),
        sys.gettrace(),
        sys.getprofile(),
    )


def _settings() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        vars(torch._tensor_str.PRINT_OPTS).copy(),  # noqa: SLF001 - there is no public way to read them
        sys.getrecursionlimit(),
        list(warnings.filters),
    )


__all__ = ["Leftovers", "thread_settings"]
