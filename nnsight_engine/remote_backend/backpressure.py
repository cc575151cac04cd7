"""Memory limits for events of running traces that the client has not read yet, per trace and in total.

Blocks produce events at the model's pace, while clients read at their own. Unread events are buffered, up to
a limit for each trace and a limit for all traces together, so that many slow readers cannot exhaust the
memory. When the total limit is exceeded, the trace with the most unread bytes is ended, not the trace that
happens to add the next event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_BYTES: Final = 2**30
MAX_TOTAL_BYTES: Final = 2**31


class SlowReaderError(RuntimeError):
    """The events of a trace's blocks were not read fast enough."""

    @classmethod
    def over(cls, max_bytes: int) -> SlowReaderError:
        """Return the error for one trace that exceeds its own limit."""
        return cls(
            f"More than {max_bytes:,} bytes of the blocks' events are unread, so the trace was ended. "
            "Read its outputs faster, or save less at each step."
        )

    @classmethod
    def over_all(cls, max_bytes: int) -> SlowReaderError:
        """Return the error for the trace with the most unread bytes when the total limit is exceeded."""
        return cls(
            f"More than {max_bytes:,} bytes of all traces' events are unread, the most of them "
            "this trace's, so it was ended. Read its outputs faster, or save less at each step."
        )


Drop = Callable[[SlowReaderError], None]
"""Discards all unread events of a trace, for the given reason."""


class Backpressure:
    """Accounting of unread bytes over all traces.

    Args:
        max_bytes: Limit in bytes for all traces together.
    """

    def __init__(self, max_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._shares: set[UnreadShare] = set()

    @property
    def num_bytes(self) -> int:
        """Total number of unread bytes."""
        return sum(share.num_bytes for share in self._shares)

    def share(self, drop: Drop, max_bytes: int = MAX_BYTES) -> UnreadShare:
        """Register a trace, and return its share; the caller must ``close`` it in the end.

        Args:
            drop: Called when the trace is over its limit, or has the most unread bytes of an exceeded total.
            max_bytes: Limit in bytes for this trace.
        """
        share = UnreadShare(self, drop, max_bytes)
        self._shares.add(share)
        return share

    def close(self, share: UnreadShare) -> None:
        """Unregister a share."""
        self._shares.discard(share)

    def check(self) -> None:
        """Enforce the total limit by dropping the largest shares."""
        while self.num_bytes > self._max_bytes:
            max(self._shares, key=lambda share: share.num_bytes).drop(
                SlowReaderError.over_all(self._max_bytes)
            )


class UnreadShare:
    """Accounting of the unread bytes of one trace.

    Attributes:
        num_bytes: Number of unread bytes.
    """

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
        """Record that bytes were read."""
        self.num_bytes -= num_bytes

    def drop(self, error: SlowReaderError) -> None:
        """Discard the unread bytes."""
        self.num_bytes = 0
        self._drop(error)

    def close(self) -> None:
        """Unregister the share at the end of the trace."""
        self._unread.close(self)


__all__ = ["Backpressure", "Drop", "SlowReaderError", "UnreadShare"]
