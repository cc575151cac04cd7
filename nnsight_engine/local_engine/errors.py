from __future__ import annotations


class TraceCancelledError(BaseException):
    """The trace is to end. Not an ``Exception``, so that ``except Exception`` does not catch it."""
