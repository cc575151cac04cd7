"""Redirection of the text that blocks print to the clients that sent them.

``sys.stdout`` dispatches on the writing thread: a block has a thread of its own, others use the original
stream.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from nnsight_engine.remote_backend.prints import Prints


class BlockStdout:
    def __init__(self, real: Any) -> None:
        self._real = real
        self._own = threading.local()

    @staticmethod
    def install() -> BlockStdout:
        """Return the object that replaces ``sys.stdout``, installing it if there is none."""
        now = sys.stdout
        if not isinstance(now, BlockStdout):
            sys.stdout = now = BlockStdout(now)
        return now

    def enter(self, prints: Prints) -> None:
        """Redirect the calling thread's output to ``prints`` until the thread ends."""
        self._own.prints = prints

    def write(self, text: str) -> int:
        prints: Prints | None = getattr(self._own, "prints", None)
        if prints is None:
            written: int = self._real.write(text)
            return written
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        prints.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


__all__ = ["BlockStdout"]
