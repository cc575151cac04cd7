"""Which phase the server is in, who is still being served, and what new requests are told.

The engine loads in the background, so the port answers from the first second. Phases only go
forward: starting, ready, draining; or dead, from anywhere. ``create_app`` owns the one instance;
whoever handles signals calls ``begin_drain`` at the first of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Iterator

from api_schemas.errors import ApiError, ErrorCode
from app.engine.client import EngineClient

logger = logging.getLogger(__name__)


class Phase(enum.StrEnum):
    """What the server can do at the moment."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Lifecycle:
    """The phase of one server.

    Args:
        engine: The engine to start, to watch and to close.
        on_engine_failure: Called once where the engine does not start, so that a command line can end
            the process.
    """

    def __init__(self, engine: EngineClient, on_engine_failure: Callable[[], None] | None = None) -> None:
        """Begin in the phase ``starting``; nothing runs yet."""
        self._engine = engine
        self._on_engine_failure = on_engine_failure
        self._start: asyncio.Task[None] | None = None
        self._has_failed = False
        self._is_draining = False
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def phase(self) -> Phase:
        """The phase now; asked of the engine, never stored, so it cannot go stale."""
        if self._has_failed or not self._engine.alive:
            return Phase.DEAD
        if self._is_draining:
            return Phase.DRAINING
        return Phase.READY if self._engine.ready else Phase.STARTING

    @property
    def num_in_flight(self) -> int:
        """Requests being answered, streams included until their last byte, and jobs being run."""
        return self._num_in_flight

    def refusal(self) -> ApiError | None:
        """Return why new work is refused now, or None where it is welcome."""
        phase = self.phase
        if phase is Phase.READY:
            return None
        if phase is Phase.STARTING:
            return ApiError(
                ErrorCode.STARTING,
                "The engine is still loading the model; GET /health/ready turns 200 when it serves.",
            )
        if phase is Phase.DRAINING:
            return ApiError(
                ErrorCode.DRAINING,
                "The server is shutting down and takes no new requests; send it to another replica.",
            )
        return ApiError(
            ErrorCode.ENGINE_DEAD,
            "The engine has stopped and this server must be restarted; its log says why.",
        )

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count one request, or one job, as in flight for the length of the block."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    def start(self) -> None:
        """Start the engine in the background; called inside the running event loop."""
        self._start = asyncio.create_task(self._start_engine(), name="engine-start")

    async def started(self) -> None:
        """Wait until the engine has started, or has failed to."""
        if self._start is not None:
            await asyncio.wait({self._start})

    def begin_drain(self) -> None:
        """Refuse new work from now on; requests in flight go on."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; return whether that came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def drain(self, drain_timeout_s: float) -> None:
        """Refuse new work and wait for what is in flight, but not for ever."""
        self.begin_drain()
        if not await self.wait_idle(drain_timeout_s):
            logger.warning(
                "closing with %d requests in flight after %s s", self.num_in_flight, drain_timeout_s
            )

    async def close(self) -> None:
        """Close the engine, whatever state its start is in."""
        if self._start is not None:
            self._start.cancel()
            await asyncio.gather(self._start, return_exceptions=True)
        await self._engine.close()

    async def _start_engine(self) -> None:
        try:
            await self._engine.start()
        except Exception:
            logger.exception("the engine did not start")
            self._has_failed = True
            if self._on_engine_failure is not None:
                self._on_engine_failure()
