"""Collects values on demand when metrics are scraped: the engine's counts, and the current gauges.

The engine answers between two steps, so it is queried at most once per second, regardless of the number of
scrapers, and so is the database. If one does not respond, the last known values are exposed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from app.engine.client import EngineClient
from app.http.lifecycle import Lifecycle
from app.observability.metrics import GaugeValues, Metrics

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0
"""The pause between a response and the next query."""

_TIMEOUT_S: Final = 2.0
"""How long a scrape waits for a response before it uses the last known values."""


class Jobs(Protocol):
    async def levels(self) -> tuple[dict[str, int], float]:
        """Return the number of jobs by status, and for how long the oldest waiting one has waited."""


class _Query:
    """A query that runs at most once per second, shared by all scrapers; it raises nothing."""

    def __init__(self, query: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._query = query
        self._task: asyncio.Task[None] | None = None
        self._answered_at = float("-inf")

    async def answered(self) -> None:
        """Wait two seconds at most for the query that runs, or for a new one if the last is a second old."""
        if self._task is None and time.monotonic() - self._answered_at >= _PAUSE_S:
            self._task = asyncio.create_task(self._run_query(), name="metrics")
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_TIMEOUT_S)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run_query(self) -> None:
        try:
            await self._query()
        finally:
            self._task, self._answered_at = None, time.monotonic()


class Scrape:
    """The answer of ``/metrics``.

    ``waiting`` returns the waiting requests by queue, ``stored`` the used bytes and their limit by store,
    ``restarts`` how often the engine was started again.
    """

    def __init__(
        self,
        metrics: Metrics,
        engine: EngineClient,
        lifecycle: Lifecycle,
        jobs: Jobs,
        *,
        waiting: Callable[[], Mapping[str, int]],
        stored: Callable[[], Mapping[str, tuple[int, int]]],
        restarts: Callable[[], int] = lambda: 0,
    ) -> None:
        self._metrics = metrics
        self._engine = engine
        self._lifecycle = lifecycle
        self._jobs = jobs
        self._waiting = waiting
        self._stored = stored
        self._restarts = restarts
        self._known_jobs: tuple[dict[str, int], float] = ({}, 0.0)
        self._queries = (_Query(self._query_engine), _Query(self._query_jobs))

    async def exposition(self) -> bytes:
        """Return the metrics as text, after an update of the engine's counts and of the gauges."""
        await asyncio.gather(*(query.answered() for query in self._queries))
        jobs, oldest_s = self._known_jobs
        levels = GaugeValues(
            self._lifecycle.phase,
            self._lifecycle.num_in_flight,
            {**self._waiting(), "jobs": jobs.get("QUEUED", 0)},
            jobs,
            oldest_s,
            self._stored(),
        )
        self._metrics.update_gauges(levels)
        self._metrics.count_restarts(self._restarts())
        return await self._metrics.exposition()

    async def close(self) -> None:
        for query in self._queries:
            await query.close()
        self._metrics.close()

    async def _query_engine(self) -> None:
        try:
            if self._engine.ready:
                number = self._restarts()
                counts = await self._engine.count_events()
                if number == self._restarts():  # otherwise the counts may be of either engine
                    self._metrics.count_engine(counts, number)
        except Exception:
            logger.warning("reading the engine's counters failed", exc_info=True)

    async def _query_jobs(self) -> None:
        try:
            self._known_jobs = await self._jobs.levels()
        except Exception:
            logger.warning("counting the jobs in the database failed", exc_info=True)
