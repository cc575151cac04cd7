"""Buffer for the printed output of blocks, forwarded to the client line by line and bounded in size."""

from __future__ import annotations

from typing import Final

MAX_BYTES: Final = 2**20
"""Limit for the output of one request."""


class Prints:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._left = max_bytes
        self._note = f"[the block printed more than {max_bytes:,} bytes; the rest is left out]\n"
        self._parts: list[bytes] = []

    def write(self, text: str) -> None:
        """Append text; output over the limit is dropped and replaced by a note."""
        data = str.encode(text, "utf-8", "backslashreplace")  # bypasses methods of str subclasses
        if self._left < 0:
            return
        self._parts.append(data[: self._left])
        self._left -= len(data)
        if self._left < 0:
            self._parts.append(b"\n" + self._note.encode())

    def take(self, *, everything: bool = False) -> str:
        """Return the complete lines since the last call; with ``everything``, an incomplete last line too."""
        if not self._parts:
            return ""
        parts, self._parts = self._parts, []
        data = b"".join(parts)
        end = len(data) if everything else data.rfind(b"\n") + 1
        if end < len(data):
            self._parts.insert(0, data[end:])
        return data[:end].decode("utf-8", "replace")


__all__ = ["MAX_BYTES", "Prints"]
