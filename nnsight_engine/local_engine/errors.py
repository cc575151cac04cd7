"""Errors of a trace on the local engine, except for those that its own code raises."""

from __future__ import annotations


class TraceCancelledError(BaseException):
    """The trace is to end: its client has disconnected, or its time is over.

    Not an ``Exception``, so that an ``except Exception`` in a block does not catch it.
    """
