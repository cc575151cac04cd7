"""Cancellation of a trace from another thread: an exception at its current line, even if that line blocks.

It uses a signal, because nothing else interrupts a thread that sleeps or reads. The exception is raised in
the main thread, where traces run, and only between ``begin`` and ``end``.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

from nnsight_engine.local_engine.errors import TraceCancelledError

_SIGNAL: Final = signal.SIGUSR1


class Cancelling:
    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._number: int | None = None
        self._num_deferred = 0
        self._is_due = False
        signal.signal(_SIGNAL, self._on_signal)

    def begin(self, number: int) -> None:
        self._is_due = False
        self._number = number

    def end(self) -> None:
        self._number = None

    def cancel(self, number: int) -> None:
        """Cancel a trace, from any thread, if it is the one that runs."""
        if self._number == number and self._main is not None:
            signal.pthread_kill(self._main, _SIGNAL)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer cancellation within the context; raise TraceCancelledError at its end instead."""
        if threading.get_ident() != self._main:
            yield  # a thread that a block has started is not cancelled
            return
        self._num_deferred += 1
        try:
            yield
        finally:
            self._num_deferred -= 1
        if self._is_due:
            self._raise()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._number is None:
            return
        if self._num_deferred:
            self._is_due = True
        else:
            self._raise()

    def _raise(self) -> None:
        self._is_due = False
        raise TraceCancelledError("the trace was cancelled")
