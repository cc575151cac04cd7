"""What blocks print, kept for whoever sent them.

A block that came over a network prints for its sender, who does not see the worker's output. So the worker's
``sys.stdout`` is stood in for by one that looks which thread is writing: a block has a thread of its own, and
what is written on it goes to its request. Everybody else's output goes where it went before.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from nnsight_engine.remote_backend.prints import Prints


class BlockStdout:
    """Stands for ``sys.stdout``; like it in everything but where blocks' output goes."""

    def __init__(self, real: Any) -> None:
        """Stand for this one."""
        self._real = real
        self._own = threading.local()

    @staticmethod
    def install() -> BlockStdout:
        """Return the one that stands for ``sys.stdout``, from now on if there was none."""
        now = sys.stdout
        if not isinstance(now, BlockStdout):
            sys.stdout = now = BlockStdout(now)
        return now

    def enter(self, prints: Prints) -> None:
        """Keep what the calling thread prints, until it ends."""
        self._own.prints = prints

    def write(self, text: str) -> int:
        """Write, to whom the calling thread prints."""
        prints: Prints | None = getattr(self._own, "prints", None)
        if prints is None:
            written: int = self._real.write(text)
            return written
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        prints.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write one after another."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return what the real one has."""
        return getattr(self._real, name)


__all__ = ["BlockStdout"]
