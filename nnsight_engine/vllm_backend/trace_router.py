"""Routing of the events of running blocks to the listeners of their traces.

The worker sends newly saved values and printed text along with a step's outputs. This module passes them to
the trace's listener just before vLLM processes the outputs that carried them.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from nnsight_engine.remote_backend.backpressure import MAX_BYTES, Backpressure, SlowReaderError, UnreadShare

logger = logging.getLogger(__name__)


class TraceEvent(NamedTuple):
    """Data that a block sent after a step.

    Attributes:
        block: The block.
        choice: The number of the choice, below ``n``.
        delta: Encoded newly saved values; None if there are none.
        printed: Printed text.
    """

    block: int
    choice: int
    delta: bytes | None
    printed: str


class TraceListener(abc.ABC):
    """Receives the events of one trace."""

    @abc.abstractmethod
    def add_event(self, event: TraceEvent) -> None:
        """Store an event that a block sent after a step."""

    @abc.abstractmethod
    def drop_events(self, error: SlowReaderError) -> None:
        """Drop the unread events, since they exceed a limit."""

    def on_arrival(self) -> None:  # noqa: B027 - optional
        """Record that the engine has received one of the trace's requests."""


class TraceRouter:
    """Registry of the listeners of open traces, with their shares of the limit on unread bytes.

    Args:
        unread: The limit on unread bytes of all traces together.
    """

    def __init__(self, unread: Backpressure | None = None) -> None:
        self._unread = unread or Backpressure()
        self._open: dict[str, tuple[TraceListener, UnreadShare]] = {}

    def __len__(self) -> int:
        """Return the number of open traces."""
        return len(self._open)

    def open(self, key: str, listener: TraceListener, *, max_bytes: int = MAX_BYTES) -> UnreadShare:
        """Register a trace's listener; the caller must ``close`` it.

        Args:
            key: The trace.
            listener: Receives the trace's events.
            max_bytes: Limit on the trace's unread bytes.

        Returns:
            The share with which the listener counts bytes that wait and bytes that were read.
        """
        share = self._unread.share(listener.drop_events, max_bytes)
        self._open[key] = listener, share
        return share

    def close(self, key: str) -> None:
        """Remove a trace and its share of unread bytes; later events of the trace are dropped."""
        found = self._open.pop(key, None)
        if found is not None:
            found[1].close()

    def note_arrival(self, key: str) -> None:
        """Inform a trace's listener that the engine has received one of its requests."""
        found = self._open.get(key)
        if found is not None:
            found[0].on_arrival()

    def deliver(self, payload: Sequence[Any], choice: int) -> None:
        """Pass the events of a step to the listeners of their traces."""
        for key, index, delta, printed in payload:
            found = self._open.get(key)
            if found is None:
                continue
            try:
                found[0].add_event(TraceEvent(index, choice, delta, printed))
            except Exception:  # an error in vLLM's output handler, which calls this, would end the engine
                logger.exception("an event of a block could not be delivered")
