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
_LoggerState = tuple[int, list[Any], list[Any], bool, bool]


def _working_directory() -> str:
    """Return the working directory; empty if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _set_warning_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index] # typed as a sequence, but it is a list


def _state_of(logger: logging.Logger) -> _LoggerState:
    return logger.level, [*logger.handlers], [*logger.filters], logger.propagate, logger.disabled


def _loggers() -> dict[logging.Logger, _LoggerState]:
    """Return the state of every logger that exists now."""
    existing = [
        logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)
    ]
    return {logger: _state_of(logger) for logger in (logging.root, *existing)}


def _identities(state: _LoggerState) -> tuple[Any, ...]:
    """Return a logger's state in a form in which objects are compared by identity."""
    level, handlers, filters, propagate, disabled = state
    return level, [*map(id, handlers)], [*map(id, filters)], propagate, disabled


def _set_loggers(loggers: dict[logging.Logger, _LoggerState]) -> None:
    """Restore the loggers whose state has changed."""
    for logger, state in loggers.items():
        if _identities(_state_of(logger)) != _identities(state):
            level, handlers, filters, logger.propagate, logger.disabled = state
            logger.setLevel(level)
            logger.handlers[:], logger.filters[:] = handlers, filters


def _signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_signal_handlers(handlers: dict[int, Any]) -> None:
    """Restore changed handlers; OSError if one was not set by Python, so that it cannot be."""
    current = _signal_handlers()
    for number, handler in handlers.items():
        if current[number] is not handler:
            if handler is None:
                raise OSError(f"the handler of signal {number} was C code's, and is lost")
            signal.signal(number, handler)


_TIMERS: Final = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_HOOKS: Final = (
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
_Settings = tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...]
_OBJECTS: Final[_Settings] = (
    (_signal_handlers, _set_signal_handlers),
    (
        functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()),
        functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK),
    ),
    (sys.gettrace, sys.settrace),
    (sys.getprofile, sys.setprofile),
    (lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    (lambda: list(warnings.filters), _set_warning_filters),
    (_loggers, _set_loggers),
)
"""Settings that are always written: a block's objects could claim to be equal to what was there."""
_SETTINGS: Final[_Settings] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (lambda: torch.is_autocast_enabled("cpu"), lambda value: torch.set_autocast_enabled("cpu", value)),
    (lambda: torch.is_autocast_enabled("cuda"), lambda value: torch.set_autocast_enabled("cuda", value)),
    (lambda: torch.backends.cudnn.allow_tf32, functools.partial(setattr, torch.backends.cudnn, "allow_tf32")),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (_working_directory, os.chdir),
    (lambda: dict(os.environ), set_environment),
    (lambda: logging.root.manager.disable, logging.disable),
)  # fmt: skip
"""How each setting is read and written."""


def _restored(settings: _Settings, values: list[Any], *, always: bool) -> bool:
    """Write each setting, or only those that have changed; return False if one could not be."""
    is_complete = True
    for (read, write), value in zip(settings, values, strict=True):
        try:
            if always or read() != value:
                write(value)
        except (OSError, RecursionError):
            is_complete = False
    return is_complete


class ProcessState:
    def __init__(self) -> None:
        """Take the snapshot of settings, hooks and threads, on the main thread."""
        self._hooks = [getattr(owner, name) for owner, name in _HOOKS]
        self._objects = [read() for read, _ in _OBJECTS]
        self._settings = [read() for read, _ in _SETTINGS]
        self._threads = _thread_ids()

    def restore(self) -> bool:
        """Restore the settings; return False if one cannot be, or if there are new threads."""
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        for (owner, name), hook in zip(_HOOKS, self._hooks, strict=True):
            setattr(owner, name, hook)
        renew_globals()
        objects = _restored(_OBJECTS, self._objects, always=True)
        settings = _restored(_SETTINGS, self._settings, always=False)
        return not self._remaining_threads() and objects and settings

    def _remaining_threads(self) -> set[int]:
        """Wait a little for threads that blocks have started; return the ids of those that live on."""
        started = _thread_ids() - self._threads
        for thread in threading.enumerate() if started else ():
            if thread.ident in started:
                thread.join(_JOIN_S)
        return _thread_ids() - self._threads if started else started


def _thread_ids() -> set[int]:
    return set(sys._current_frames())  # noqa: SLF001 - with threads unknown to threading


def renew_globals() -> None:
    """Give the next trace the defaults of torch, and random numbers of its own."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(mode=True)
    torch.seed()
    random.seed()
    np.random.seed()
