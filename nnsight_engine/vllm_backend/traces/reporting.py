"""Reports of running requests to the clients that subscribed: deltas of saved values, and printed text."""

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

Report = tuple[str, int, bytes | None, str]
"""The trace's key, the block's index, the encoded delta of its saved values, and the printed text."""


class Reporting:
    def __init__(self) -> None:
        self._deltas: dict[str, Deltas] = {}
        self._prints: dict[str, Prints] = {}
        self._remaining: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._prints) + len(self._remaining) + len(self._failed)

    def open(self, request_id: str, entry: TraceEntry) -> Callable[[], None]:
        """Register a request; return a function that its blocks' threads call before anything else."""
        if entry.streams:
            self._deltas[request_id] = Deltas()
        if not entry.prints:
            return _nothing
        prints = self._prints[request_id] = Prints()
        return partial(BlockStdout.install().enter, prints)

    def may_report(self, request_id: str) -> bool:
        return request_id in self._deltas or request_id in self._prints

    def report(
        self, request_id: str, entry: TraceEntry, saves: Callable[[], dict[str, Any]]
    ) -> Report | None:
        """Return the report of a request after a step; None if there is nothing to report."""
        prints = self._prints.get(request_id)
        printed = "" if prints is None else prints.take()
        data = self._new_saves(request_id, saves)
        return (entry.key, entry.index, data, printed) if data is not None or printed else None

    def _new_saves(self, request_id: str, saves: Callable[[], dict[str, Any]]) -> bytes | None:
        deltas = self._deltas.get(request_id)
        if deltas is None:
            return None
        try:
            return deltas.of(saves())
        except Exception:
            logger.exception("the saved values of a block cannot be reported; they are collected at its end")
            del self._deltas[request_id]
            return None

    def close(self, request_id: str, key: str) -> None:
        """Unregister a request; retain the rest of its printed text until it is fetched with the trace."""
        self._deltas.pop(request_id, None)
        prints = self._prints.pop(request_id, None)
        last = "" if prints is None else prints.take(everything=True)
        if last:
            self._remaining[key] = self._remaining.get(key, "") + last

    def fail(self, key: str, failure: str) -> None:
        if failure:
            self._failed[key] = failure

    def take_remaining(self, key: str) -> tuple[str, str]:
        """Return and remove a trace's remaining printed text and the text of its failure."""
        return self._remaining.pop(key, ""), self._failed.pop(key, "")


def _nothing() -> None: ...


__all__ = ["Report", "Reporting"]
