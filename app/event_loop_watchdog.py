"""Whether the event loop goes on: noticed from outside of it, counted, and logged with what it was doing.

Everything that a server does waits for its loop. What holds that up, a computation that should have been
elsewhere, shows as slow answers of everybody and says nothing of itself.
"""

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

_BEAT_S: Final = 0.05
_STALL_S: Final = 1.0
"""From which on a pause counts, and is logged."""
_MAX_FRAMES: Final = 12


class Counted(Protocol):
    """What stalls are counted in."""

    def count_stall(self, seconds: float, *, is_new: bool) -> None:
        """Count a stall, or that one goes on."""


class LoopWatch:
    """Watches the event loop of the thread that makes it.

    Args:
        counted: Learns of stalls; None if nobody does.
    """

    def __init__(self, counted: Counted | None) -> None:
        """Watch nothing yet."""
        self._counted = counted
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._beat = time.monotonic()
        self._told_s = 0.0

    @property
    def lag_s(self) -> float:
        """For how long the loop has not come round, beyond its pace."""
        return max(0.0, time.monotonic() - self._beat - _BEAT_S)

    async def beat(self) -> None:
        """Come round, until cancelled; in the loop that is watched."""
        while True:
            with self._lock:
                lag_s, told_s = self.lag_s, self._told_s
                self._beat, self._told_s = time.monotonic(), 0.0
            if lag_s >= _STALL_S:
                self._count(lag_s - told_s, is_new=not told_s)
                logger.warning("the event loop goes on after %.1f s", lag_s)
            await asyncio.sleep(_BEAT_S)

    async def watch(self) -> None:
        """Look at it, until cancelled; in another loop, of another thread."""
        while True:
            await asyncio.sleep(_BEAT_S)
            with self._lock:
                lag_s, told_s = self.lag_s, self._told_s
                if lag_s < _STALL_S:
                    continue
                self._told_s = lag_s
            self._count(lag_s - told_s, is_new=not told_s)
            if not told_s:
                logger.warning("the event loop has stopped for %.1f s, in %s", lag_s, self._where())

    def _count(self, seconds: float, *, is_new: bool) -> None:
        if self._counted is not None:
            self._counted.count_stall(seconds, is_new=is_new)

    def _where(self) -> str:
        """Return what the loop's thread is doing: places in code, and nothing of values."""
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - the standard library's, and documented
        frames = traceback.extract_stack(frame, _MAX_FRAMES) if frame is not None else []
        return " > ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in frames)


__all__ = ["LoopWatch"]
