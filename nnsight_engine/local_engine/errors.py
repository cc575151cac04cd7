"""What can go wrong with a trace on the local engine, beside what it raises itself."""

from __future__ import annotations


class TraceCancelledError(BaseException):
    """The trace is to end: whoever waited for it has gone, or its time is over.

    Not an ``Exception``, so that a block's ``except Exception`` does not swallow it.
    """
