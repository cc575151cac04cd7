"""What running traces have told and nobody has read yet: how much of it there may be, of each and of all.

Blocks tell of themselves at the model's pace, clients read at theirs. What waits in between is kept, up to a
limit for one trace and one for all together, so that many slow readers cannot fill the memory. Over the
latter the trace goes of whom the most waits, and not the one that happens to tell something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_BYTES: Final = 2**30
MAX_TOTAL_BYTES: Final = 2**31


class SlowReaderError(RuntimeError):
    """What blocks told of themselves was not read for too long."""

    @classmethod
    def over(cls, max_bytes: int) -> SlowReaderError:
        """There would be more than this of one trace."""
        return cls(
            f"More than {max_bytes:,} bytes that the blocks told wait to be read, so the trace was ended. "
            "Read its outputs faster, or save less at each step."
        )

    @classmethod
    def over_all(cls, max_bytes: int) -> SlowReaderError:
        """There would be more than this of all traces."""
        return cls(
            f"More than {max_bytes:,} bytes that blocks of all traces told wait to be read, the most of them "
            "this trace's, so it was ended. Read its outputs faster, or save less at each step."
        )


Drop = Callable[[SlowReaderError], None]
"""Lets go of everything of a trace that waits, for this reason."""


class Backpressure:
    """What waits, of all traces together.

    Args:
        max_bytes: How much may.
    """

    def __init__(self, max_bytes: int = MAX_TOTAL_BYTES) -> None:
        """Start with nothing."""
        self._max_bytes = max_bytes
        self._shares: set[UnreadShare] = set()

    @property
    def num_bytes(self) -> int:
        """How much waits."""
        return sum(share.num_bytes for share in self._shares)

    def share(self, drop: Drop, max_bytes: int = MAX_BYTES) -> UnreadShare:
        """Begin with a trace; ``close`` its share in the end.

        Args:
            drop: Called when too much waits.
            max_bytes: How much of it may wait.
        """
        share = UnreadShare(self, drop, max_bytes)
        self._shares.add(share)
        return share

    def close(self, share: UnreadShare) -> None:
        """Forget a share."""
        self._shares.discard(share)

    def check(self) -> None:
        """Have room for what waits, at the cost of whom the most waits of."""
        while self.num_bytes > self._max_bytes:
            max(self._shares, key=lambda share: share.num_bytes).drop(
                SlowReaderError.over_all(self._max_bytes)
            )


class UnreadShare:
    """What waits of one trace.

    Attributes:
        num_bytes: How much that is.
    """

    def __init__(self, unread: Backpressure, drop: Drop, max_bytes: int) -> None:
        """Start with nothing."""
        self.num_bytes = 0
        self._unread = unread
        self._drop = drop
        self._max_bytes = max_bytes

    def add(self, num_bytes: int) -> None:
        """Take note that so much waits now, which its trace has already; it may be dropped."""
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            self.drop(SlowReaderError.over(self._max_bytes))
        self._unread.check()

    def take(self, num_bytes: int) -> None:
        """Take note that so much was read."""
        self.num_bytes -= num_bytes

    def drop(self, error: SlowReaderError) -> None:
        """Let go of what waits."""
        self.num_bytes = 0
        self._drop(error)

    def close(self) -> None:
        """End with the trace."""
        self._unread.close(self)


__all__ = ["Backpressure", "Drop", "SlowReaderError", "UnreadShare"]
