"""What blocks print, kept for whoever sent them.

A block that came over a network prints for its sender, who does not see the worker's output. So the worker's
``sys.stdout`` is stood in for by one that looks which thread is writing: a block has a thread of its own, and
what is written on it goes to its request. Everybody else's output goes where it went before.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

MAX_BYTES: Final = 2**20
"""That one request may print."""


class Prints:
    """What one request's blocks have printed and nobody has fetched yet."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Start with nothing."""
        self._left = max_bytes
        self._note = f"[the block printed more than {max_bytes:,} bytes; the rest is left out]\n"
        self._parts: list[bytes] = []

    def write(self, text: str) -> None:
        """Take note of some text; what is over the limit is left out."""
        data = str.encode(text, "utf-8", "backslashreplace")  # whatever the text's class makes of it
        if self._left < 0:
            return
        self._parts.append(data[: self._left])
        self._left -= len(data)
        if self._left < 0:
            self._parts.append(b"\n" + self._note.encode())

    def take(self, *, everything: bool = False) -> str:
        """Return the lines that have come since the last call.

        Args:
            everything: Return what stands on a line that has not ended as well.
        """
        if not self._parts:
            return ""
        parts, self._parts = self._parts, []
        data = b"".join(parts)
        end = len(data) if everything else data.rfind(b"\n") + 1
        if end < len(data):
            self._parts.insert(0, data[end:])
        return data[:end].decode("utf-8", "replace")


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


__all__ = ["MAX_BYTES", "BlockStdout", "Prints"]
