"""The state of a process that a block may change, restored between any two traces.

It is settings, environment, working directory, streams, hooks, warnings, logging and signal handlers.
Otherwise a block's ``sys.stdout`` would receive the next client's output, and an ignored signal would make
later traces impossible to cancel. The snapshot is taken on the main thread. Loggers that did not exist then
are left as they are.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.core.process import set_environment

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


_ATTRIBUTES: Final = (
    *(
        (sys, name)
        for name in (
            "stdin", "stdout", "stderr", "excepthook", "unraisablehook", "displayhook", "breakpointhook",
        )
    ),
    (threading, "excepthook"),
    (warnings, "showwarning"),
    (warnings, "formatwarning"),
)  # fmt: skip
_TIMERS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_MISSING: Final = object()
_LoggerState = tuple[int, list[Any], list[Any], bool, bool]


class ProcessHooks:
    def __init__(self) -> None:
        self._attributes = [getattr(owner, name) for owner, name in _ATTRIBUTES]
        self._filters = list(warnings.filters)
        self._disabled = logging.root.manager.disable
        self._loggers = {logger: _state_of(logger) for logger in _loggers()}
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def restore(self) -> bool:
        """Restore everything; return False if a signal handler of C code was replaced, which is lost."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        is_complete = self._restore_signals()
        for (owner, name), known in zip(_ATTRIBUTES, self._attributes, strict=True):
            if getattr(owner, name, _MISSING) is not known:
                setattr(owner, name, known)
        if list(warnings.filters) != self._filters:
            warnings.resetwarnings()
            warnings.filters[:] = self._filters  # type: ignore[index] # typed as a sequence, but it is a list
        if logging.root.manager.disable != self._disabled:
            logging.disable(self._disabled)
        for logger, known in self._loggers.items():
            if _state_of(logger) != known:
                _put_state(logger, known)
        return is_complete

    def _restore_signals(self) -> bool:
        is_complete = True
        for number, known in self._handlers.items():
            if signal.getsignal(number) is known:
                continue
            if known is None:
                is_complete = False
            else:
                signal.signal(number, known)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        return is_complete


def _loggers() -> list[logging.Logger]:
    known = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    return [logging.root, *known]


def _state_of(logger: logging.Logger) -> _LoggerState:
    return logger.level, [*logger.handlers], [*logger.filters], logger.propagate, logger.disabled


def _put_state(logger: logging.Logger, state: _LoggerState) -> None:
    level, handlers, filters, propagate, disabled = state
    logger.setLevel(level)
    logger.handlers[:], logger.filters[:] = handlers, filters
    logger.propagate, logger.disabled = propagate, disabled
