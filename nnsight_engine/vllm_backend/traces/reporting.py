"""What the requests of a worker tell while they run, to whoever asked for it: new saves, and prints.

The worker's traces open a request here when it comes and close it when it is collected; in between they ask
after each step what there is to tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nnsight_engine.remote_backend.prints import Prints
from nnsight_engine.vllm_backend.traces.deltas import Deltas
from nnsight_engine.vllm_backend.traces.prints import BlockStdout

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.entry import TraceEntry

logger = logging.getLogger(__name__)

Parcel = tuple[str, int, bytes | None, str]
"""The trace, the block, what it has newly saved, what it printed."""


class Reporting:
    """Who is to be told what."""

    def __init__(self) -> None:
        """Start without requests."""
        self._news: dict[str, Deltas] = {}
        self._prints: dict[str, Prints] = {}
        self._left: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    def __len__(self) -> int:
        """Return how many requests' prints nobody has fetched."""
        return len(self._prints) + len(self._left) + len(self._failed)

    def open(self, request_id: str, entry: TraceEntry) -> Callable[[], None]:
        """Begin with a request; returns what its blocks' threads call before anything else."""
        if entry.streams:
            self._news[request_id] = Deltas()
        if not entry.prints:
            return _nothing
        prints = self._prints[request_id] = Prints()
        return partial(BlockStdout.install().enter, prints)

    def has_news(self, request_id: str) -> bool:
        """Tell whether there may be something to tell of a request."""
        return request_id in self._news or request_id in self._prints

    def told(self, request_id: str, entry: TraceEntry, saves: Callable[[], dict[str, Any]]) -> Parcel | None:
        """Return what is to be told of a request after a step.

        Args:
            request_id: The request.
            entry: Its part in its trace.
            saves: Gives what its block has saved so far, by name.
        """
        prints = self._prints.get(request_id)
        printed = "" if prints is None else prints.take()
        data = self._new_saves(request_id, saves)
        return (entry.key, entry.index, data, printed) if data is not None or printed else None

    def _new_saves(self, request_id: str, saves: Callable[[], dict[str, Any]]) -> bytes | None:
        news = self._news.get(request_id)
        if news is None:
            return None
        try:
            return news.of(saves())
        except Exception:
            logger.exception("what a block has saved cannot be told; it is collected in the end")
            del self._news[request_id]
            return None

    def close(self, request_id: str, key: str) -> None:
        """End with a request; what it printed last waits to be fetched with its trace."""
        self._news.pop(request_id, None)
        prints = self._prints.pop(request_id, None)
        last = "" if prints is None else prints.take(everything=True)
        if last:
            self._left[key] = self._left.get(key, "") + last

    def fail(self, key: str, failure: str) -> None:
        """Take note that a block of a trace failed, and of what is to be said of it."""
        if failure:
            self._failed[key] = failure

    def take_left(self, key: str) -> tuple[str, str]:
        """Return what a trace printed last, and what is to be said of its failure; and forget both."""
        return self._left.pop(key, ""), self._failed.pop(key, "")


def _nothing() -> None:
    """Do nothing."""


__all__ = ["Parcel", "Reporting"]
