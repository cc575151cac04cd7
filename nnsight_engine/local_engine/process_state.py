"""The state of a process that a block may change: settings, environment, working directory."""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.core.environment import set_environment

_JOIN_S: Final = 0.1
"""Seconds that a thread which a block has left behind has for ending."""


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


_SETTINGS: Final[tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...]] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (lambda: torch.is_autocast_enabled("cpu"), lambda value: torch.set_autocast_enabled("cpu", value)),
    (lambda: torch.is_autocast_enabled("cuda"), lambda value: torch.set_autocast_enabled("cuda", value)),
    (lambda: torch.backends.cudnn.allow_tf32, functools.partial(setattr, torch.backends.cudnn, "allow_tf32")),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (_working_directory, os.chdir),
    (lambda: dict(os.environ), set_environment),
    (lambda: list(sys.path), functools.partial(sys.path.__setitem__, slice(None))),
)  # fmt: skip


class ProcessState:
    def __init__(self) -> None:
        self._known = [get() for get, _ in _SETTINGS]
        self._threads = _thread_ids()

    def restore(self) -> bool:
        """Restore the settings; return False if one cannot be, or if there are new threads."""
        renew_globals()
        is_complete = True
        for (get, put), known in zip(_SETTINGS, self._known, strict=True):
            try:
                if get() != known:
                    put(known)
            except (OSError, RecursionError):
                is_complete = False
        return not self._remaining_threads() and is_complete

    def _remaining_threads(self) -> set[int]:
        left = _thread_ids() - self._threads
        for thread in threading.enumerate() if left else ():
            if thread.ident in left:
                thread.join(_JOIN_S)
        return _thread_ids() - self._threads if left else left


def _thread_ids() -> set[int]:
    return set(sys._current_frames())  # noqa: SLF001 - with threads unknown to threading


def renew_globals() -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(mode=True)
    torch.seed()
    random.seed()
    np.random.seed()


__all__ = ["ProcessState", "renew_globals"]
