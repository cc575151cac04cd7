"""Streams, hooks, warnings, logging and signal handlers of a trace process, restored between any two traces.

Otherwise a block's ``sys.stdout`` would receive the next client's output, and an ignored signal would make
later traces impossible to cancel. The snapshot is taken on the main thread. Loggers that did not exist then
are left as they are.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from typing import Any, Final

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


__all__ = ["ProcessHooks"]
