"""What ``GET /metrics`` tells: how this server's engine runs its steps, beside vLLM's own numbers.

vLLM keeps its metrics in the process's registry of ``prometheus_client``, as its own server shows them. Ours
are of one server, of which a process may have several, so they have a registry of their own. The engine
answers questions between two steps: it is asked once a second at most, however many look.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily

from app.engine.client import EngineClient

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0
"""Between the engine's last answer and the next question."""

_PATIENCE_S: Final = 2.0
"""How long is waited for an answer; then those are told that were given last."""


class Metrics:
    """The metrics of one server.

    Args:
        engine: Counts its steps.
        num_restarts: Returns how often an engine that had died was started again.
    """

    def __init__(self, engine: EngineClient, num_restarts: Callable[[], int]) -> None:
        """Know nothing yet."""
        self._num_restarts = num_restarts
        self._engine = engine
        self._num_steps: Mapping[str, int] = {}
        self._asking: asyncio.Task[None] | None = None
        self._told_at = float("-inf")
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._registry.register(REGISTRY)

    async def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        await self._ask()
        return await asyncio.to_thread(generate_latest, self._registry)

    async def close(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield what is known of the engine; called by the registry."""
        steps = CounterMetricFamily(
            "nnsight_engine_steps",
            "Steps of the engine: plain, with interventions in the compiled model, or with it uncompiled.",
            labels=["tier"],
        )
        for tier, number in self._num_steps.items():
            steps.add_metric([tier], number)
        yield steps
        yield CounterMetricFamily(
            "nnsight_engine_engine_restarts",
            "How often an engine that had died was started again.",
            value=self._num_restarts(),
        )

    async def _ask(self) -> None:
        """Learn how many steps there were, unless somebody just has; whoever is asking, is waited for."""
        is_due = self._asking is None and time.monotonic() - self._told_at >= _PAUSE_S
        if is_due and self._engine.ready:
            self._asking = asyncio.create_task(self._asked(), name="metrics")
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=_PATIENCE_S)

    async def _asked(self) -> None:
        try:
            self._num_steps = await self._engine.count_steps()
        except Exception:
            logger.warning("the engine could not be asked how many steps it has run", exc_info=True)
        finally:
            self._asking, self._told_at = None, time.monotonic()


__all__ = ["Metrics"]
