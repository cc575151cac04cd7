"""What is asked for when somebody looks at the metrics: the engine's counts, and what there is at the moment.

The engine answers questions between two steps: it is asked once a second at most, however many look, and the
database too. Where one does not answer, those who look are told what was known last.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from app.engine.client import EngineClient
from app.lifecycle import Lifecycle
from app.observability.metrics import Levels, Metrics

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0
"""Between the last answer and the next question."""

_PATIENCE_S: Final = 2.0
"""How long is waited for an answer; then those are told that were given last."""


class Jobs(Protocol):
    """What is asked of jobs."""

    async def levels(self) -> tuple[dict[str, int], float]:
        """Return how many there are by status, and for how long the first of them waits."""


class _Question:
    """Something asked once a second at most, however many want to know.

    Args:
        ask: Asks and keeps the answer; raises nothing.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._answered_at = float("-inf")

    async def answered(self) -> None:
        """Ask, unless somebody just has; whoever is asking, is waited for, but not for ever."""
        if self._asking is None and time.monotonic() - self._answered_at >= _PAUSE_S:
            self._asking = asyncio.create_task(self._asked(), name="metrics")
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=_PATIENCE_S)

    async def close(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _asked(self) -> None:
        try:
            await self._ask()
        finally:
            self._asking, self._answered_at = None, time.monotonic()


class Scrape:
    """Asks on behalf of those who look at one server's metrics.

    Args:
        metrics: Take the answers.
        engine: Counts its steps.
        lifecycle: Knows the phase.
        jobs: Know theirs.
        waiting: Returns what waits, by what it waits for.
        stored: Returns bytes kept and most that may be, by place.
        restarts: Returns how often an engine was started in place of one that died.
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
        """Know nothing yet."""
        self._metrics = metrics
        self._engine = engine
        self._lifecycle = lifecycle
        self._jobs = jobs
        self._waiting = waiting
        self._stored = stored
        self._restarts = restarts
        self._known_jobs: tuple[dict[str, int], float] = ({}, 0.0)
        self._questions = (_Question(self._ask_engine), _Question(self._ask_jobs))

    async def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        await asyncio.gather(*(question.answered() for question in self._questions))
        jobs, oldest_s = self._known_jobs
        levels = Levels(
            self._lifecycle.phase,
            self._lifecycle.num_in_flight,
            {**self._waiting(), "jobs": jobs.get("QUEUED", 0)},
            jobs,
            oldest_s,
            self._stored(),
        )
        self._metrics.set_levels(levels)
        self._metrics.count_restarts(self._restarts())
        return await self._metrics.exposition()

    async def close(self) -> None:
        """Wait for no answer any more."""
        for question in self._questions:
            await question.close()
        self._metrics.close()

    async def _ask_engine(self) -> None:
        try:
            if self._engine.ready:
                number = self._restarts()
                counts = await self._engine.count_events()
                if number == self._restarts():
                    self._metrics.count_engine(counts, number)
        except Exception:
            logger.warning("the engine could not be asked what it has counted", exc_info=True)

    async def _ask_jobs(self) -> None:
        try:
            self._known_jobs = await self._jobs.levels()
        except Exception:
            logger.warning("the database could not be asked how many jobs there are", exc_info=True)


__all__ = ["Scrape"]
