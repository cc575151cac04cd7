"""Routing of the events of running blocks to their traces, just before vLLM processes the outputs."""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from nnsight_engine.remote_backend.backpressure import MAX_BYTES, Backpressure, SlowReaderError, UnreadShare

logger = logging.getLogger(__name__)


class TraceEvent(NamedTuple):
    """Newly saved values, None for none, and printed text that a block sent after a step."""

    block: int
    choice: int
    delta: bytes | None
    printed: str


class TraceListener(abc.ABC):
    @abc.abstractmethod
    def add_event(self, event: TraceEvent) -> None: ...

    @abc.abstractmethod
    def drop_events(self, error: SlowReaderError) -> None:
        """Drop the unread events, since they exceed a limit."""

    def on_arrival(self) -> None:  # noqa: B027 - optional
        """Record that the engine has received one of the trace's requests."""


class TraceRouter:
    def __init__(self, unread: Backpressure | None = None) -> None:
        self._unread = unread or Backpressure()
        self._open: dict[str, tuple[TraceListener, UnreadShare]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, key: str, listener: TraceListener, *, max_bytes: int = MAX_BYTES) -> UnreadShare:
        """Register a listener, and return its share of unread bytes; the caller must ``close`` it."""
        share = self._unread.share(listener.drop_events, max_bytes)
        self._open[key] = listener, share
        return share

    def close(self, key: str) -> None:
        """Remove a trace and its share of unread bytes; later events of the trace are dropped."""
        found = self._open.pop(key, None)
        if found is not None:
            found[1].close()

    def note_arrival(self, key: str) -> None:
        found = self._open.get(key)
        if found is not None:
            found[0].on_arrival()

    def deliver(self, payload: Sequence[Any], choice: int) -> None:
        for key, index, delta, printed in payload:
            found = self._open.get(key)
            if found is None:
                continue
            try:
                found[0].add_event(TraceEvent(index, choice, delta, printed))
            except Exception:  # an error in vLLM's output handler, which calls this, would end the engine
                logger.exception("an event of a block could not be delivered")
