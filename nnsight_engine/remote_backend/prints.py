"""What blocks print, as far as it is passed on to whoever sent them: line by line, and not without end."""

from __future__ import annotations

from typing import Final

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


__all__ = ["MAX_BYTES", "Prints"]
