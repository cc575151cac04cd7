"""Memory limits for events and printed output of running traces that nobody has read yet.

Over the total, the trace with the most is ended. Printed output is forwarded to the client line by line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_BYTES: Final = 2**30
MAX_TOTAL_BYTES: Final = 2**31


class SlowReaderError(RuntimeError):
    @classmethod
    def over(cls, max_bytes: int) -> SlowReaderError:
        return cls(
            f"More than {max_bytes:,} bytes of the blocks' events are unread, so the trace was ended. "
            "Read its outputs faster, or save less at each step."
        )

    @classmethod
    def over_all(cls, max_bytes: int) -> SlowReaderError:
        return cls(
            f"More than {max_bytes:,} bytes of all traces' events are unread, the most of them "
            "this trace's, so it was ended. Read its outputs faster, or save less at each step."
        )


Drop = Callable[[SlowReaderError], None]
"""Discards all unread events of a trace, for the given reason."""


class Backpressure:
    def __init__(self, max_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._shares: set[UnreadShare] = set()

    @property
    def num_bytes(self) -> int:
        return sum(share.num_bytes for share in self._shares)

    def share(self, drop: Drop, max_bytes: int = MAX_BYTES) -> UnreadShare:
        """Register a trace and return its share, to be closed; ``drop`` is called over a limit."""
        share = UnreadShare(self, drop, max_bytes)
        self._shares.add(share)
        return share

    def close(self, share: UnreadShare) -> None:
        self._shares.discard(share)

    def check(self) -> None:
        """End the traces with the most unread bytes, until all have less than the limit together."""
        while self.num_bytes > self._max_bytes:
            max(self._shares, key=lambda share: share.num_bytes).drop(
                SlowReaderError.over_all(self._max_bytes)
            )


class UnreadShare:
    def __init__(self, unread: Backpressure, drop: Drop, max_bytes: int) -> None:
        self.num_bytes = 0
        self._unread = unread
        self._drop = drop
        self._max_bytes = max_bytes

    def add(self, num_bytes: int) -> None:
        """Record bytes that its trace has already buffered; drops a trace if a limit is exceeded."""
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            self.drop(SlowReaderError.over(self._max_bytes))
        self._unread.check()

    def take(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def drop(self, error: SlowReaderError) -> None:
        self.num_bytes = 0
        self._drop(error)

    def close(self) -> None:
        self._unread.close(self)


MAX_PRINTED_BYTES: Final = 2**20
"""Limit for the output of one request."""


class Prints:
    def __init__(self, max_bytes: int = MAX_PRINTED_BYTES) -> None:
        self._bytes_left = max_bytes
        self._note = f"[the block printed more than {max_bytes:,} bytes; the rest is left out]\n"
        self._parts: list[bytes] = []

    def write(self, text: str) -> None:
        """Append text; output over the limit is dropped and replaced by a note."""
        data = str.encode(text, "utf-8", "backslashreplace")  # bypasses methods of str subclasses
        if self._bytes_left < 0:
            return
        self._parts.append(data[: self._bytes_left])
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._parts.append(b"\n" + self._note.encode())

    def take_lines(self, *, everything: bool = False) -> str:
        """Return the complete lines since the last call; with ``everything``, an incomplete last line too."""
        if not self._parts:
            return ""
        parts, self._parts = self._parts, []
        data = b"".join(parts)
        end = len(data) if everything else data.rfind(b"\n") + 1
        if end < len(data):
            self._parts.insert(0, data[end:])
        return data[:end].decode("utf-8", "replace")
