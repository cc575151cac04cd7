"""Detects, counts and logs stalls of the event loop, from another thread."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Final, Protocol

logger = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 0.05
_MIN_STALL_S: Final = 1.0
"""Pauses of at least this length are counted and logged."""
_MAX_FRAMES: Final = 12


class StallCounter(Protocol):
    def count_stall(self, seconds: float, *, is_new: bool) -> None:
        """Count a new stall, or the continuation of a stall that is already counted."""


class EventLoopWatchdog:
    """Watches the event loop of the thread that constructs it."""

    def __init__(self, counted: StallCounter | None) -> None:
        self._counted = counted
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._beat = time.monotonic()
        self._reported_s = 0.0

    @property
    def lag_s(self) -> float:
        """The delay of the loop, in seconds beyond its interval."""
        return max(0.0, time.monotonic() - self._beat - _HEARTBEAT_S)

    async def beat(self) -> None:
        """Record heartbeats until cancelled; runs in the watched loop."""
        while True:
            with self._lock:
                lag_s, reported_s = self.lag_s, self._reported_s
                self._beat, self._reported_s = time.monotonic(), 0.0
            if lag_s >= _MIN_STALL_S:
                self._count(lag_s - reported_s, is_new=not reported_s)
                # If nobody could watch, as while one call held the GIL, this is the first report.
                level = logging.INFO if reported_s else logging.WARNING
                logger.log(level, "the event loop continues after it was blocked for %.1f s", lag_s)
            await asyncio.sleep(_HEARTBEAT_S)

    async def watch(self) -> None:
        """Check the heartbeats until cancelled; runs in another loop, on another thread."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            with self._lock:
                lag_s, reported_s = self.lag_s, self._reported_s
                if lag_s < _MIN_STALL_S:
                    continue
                self._reported_s = lag_s
            self._count(lag_s - reported_s, is_new=not reported_s)
            if not reported_s:
                logger.warning("the event loop has been blocked for %.1f s; requests wait", lag_s)
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug("the event loop is blocked in %s", self._where())

    def _count(self, seconds: float, *, is_new: bool) -> None:
        if self._counted is not None:
            self._counted.count_stall(seconds, is_new=is_new)

    def _where(self) -> str:
        """Return the stack of the loop's thread: locations in code, without values."""
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - the standard library's, and documented
        frames = traceback.extract_stack(frame, _MAX_FRAMES) if frame is not None else []
        return " > ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in frames)


__all__ = ["EventLoopWatchdog"]
