"""Tracks the server's phase and requests in flight; starts, restarts and closes the engine.

It loads in the background, so that the port answers at once: ``docs/decisions/0030-another-engine.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Protocol

from api_schemas.errors import ApiError, ErrorCode
from app.http.contexts import RequestDeadline
from nnsight_engine.core.errors import UnsupportedOptionError

logger = logging.getLogger(__name__)

_MAX_DELAY_S: Final = 60.0
_ERROR_DELIVERY_S: Final = 3.0
"""Time for requests that were ended to report that to their clients."""


class Phase(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"


class Startable(Protocol):
    """A component that a server starts, watches and closes: an ``EngineClient``, or a set of replicas."""

    @property
    def ready(self) -> bool:
        """False while starting and after death."""

    @property
    def alive(self) -> bool:
        """True before and while it starts."""

    async def start(self) -> None: ...

    async def died(self) -> None: ...

    async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Restarts:
    """At most ``max_restarts`` restarts within ``window_s``; then the server is dead.

    ``delay_s`` doubles for each further death within the window.
    """

    max_restarts: int = 0
    window_s: float = 900.0
    delay_s: float = 1.0


class Lifecycle:
    """The phase of one server, and its engine.

    ``on_engine_failure`` is called once, if the engine does not start or dies too often.
    """

    def __init__(
        self,
        engine: Startable,
        on_engine_failure: Callable[[str], None] | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        self._engine = engine
        self._on_engine_failure = on_engine_failure
        self._restarts = restarts or Restarts()
        self._deaths: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._has_started = asyncio.Event()
        self._has_failed = False
        self._failure = "the engine did not start; its error is above"
        self._is_restarting = False
        self._is_draining = False
        self._has_drained = False
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._given_up = asyncio.Event()
        self._deadlines: set[RequestDeadline] = set()
        self.num_restarts = 0

    @property
    def phase(self) -> Phase:
        """The current phase, derived from the engine on each access so that it cannot be stale."""
        if self._has_failed:
            return Phase.DEAD
        if self._is_draining:
            return Phase.DRAINING
        if self._is_restarting or not self._engine.alive:
            return Phase.RESTARTING
        return Phase.READY if self._engine.ready else Phase.STARTING

    @property
    def num_in_flight(self) -> int:
        """The number of requests being answered (streams up to their last byte) and of running jobs."""
        return self._num_in_flight

    def refusal(self) -> ApiError | None:
        """Return the error with which new work is rejected now, or None if the server is ready."""
        phase = self.phase
        return None if phase is Phase.READY else ApiError(*_REFUSALS[phase])

    @contextlib.contextmanager
    def serving(self, deadline: RequestDeadline | None = None) -> Iterator[None]:
        """Count one request or job as in flight; ``deadline`` ends it if the drain times out."""
        self._num_in_flight += 1
        self._idle.clear()
        if deadline is not None:
            self._deadlines.add(deadline)
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if deadline is not None:
                self._deadlines.discard(deadline)
                deadline.close()
            if self._num_in_flight == 0:
                self._idle.set()

    def start(self, then: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Start the engine, in the running loop; ``then`` runs after each start, until the engine dies."""
        self._tasks = [asyncio.create_task(self._keep_engine(then), name="engine-start")]

    async def started(self) -> None:
        await self._has_started.wait()

    def begin_drain(self) -> None:
        """Reject new work from now on; requests in flight continue."""
        self._is_draining = True

    def give_up(self) -> None:
        """Reject new work, and wait for requests in flight no longer: at the second signal."""
        self._is_draining = True
        self._given_up.set()

    async def drain(self, drain_timeout_s: float) -> None:
        """Reject new work, wait for requests in flight, and end them after the timeout.

        Only the first call waits; later calls return at once.
        """
        self.begin_drain()
        if self._has_drained:
            return
        self._has_drained = True
        waiting = [asyncio.ensure_future(waiter.wait()) for waiter in (self._idle, self._given_up)]
        try:
            await asyncio.wait(waiting, timeout=drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiting:
                waiter.cancel()
        if self._idle.is_set():
            return
        logger.warning("closing with %d requests in flight after %s s", self.num_in_flight, drain_timeout_s)
        for deadline in self._deadlines:
            deadline.end(ApiError(*_DRAIN_TIMED_OUT))
        end = time.monotonic() + _ERROR_DELIVERY_S
        while self._deadlines and time.monotonic() < end:  # noqa: ASYNC110 - the only waiter
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine.close()

    async def _keep_engine(self, then: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        """Start the engine, and again after each death; ends when it does not start, or in a drain."""
        serves = await self._start_engine()
        while serves:
            self._has_started.set()
            after_start = None if then is None else asyncio.create_task(then(), name="engine-started")
            try:
                await self._engine.died()
            finally:
                if after_start is not None:
                    after_start.cancel()
                    await asyncio.gather(after_start, return_exceptions=True)
            serves = await self._restart()
        self._has_started.set()
        if not self._is_draining:
            self._has_failed = True
            if self._on_engine_failure is not None:
                self._on_engine_failure(self._failure)

    async def _restart(self) -> bool:
        """Close and start the engine until it serves; False if no restart is left, or in a drain."""
        self._is_restarting = True
        while not self._is_draining:
            delay_s = self._delay_s()
            if delay_s is None:
                max_restarts = self._restarts.max_restarts
                self._failure = (
                    f"the engine has failed more than {max_restarts} times; not restarting it again"
                )
                return False
            logger.error("the engine has failed; restarting it in %g s", delay_s)
            try:
                await self._engine.close()
            except Exception:
                logger.exception("releasing the resources of the failed engine failed")
            await asyncio.sleep(delay_s)
            if self.phase is not Phase.DRAINING and await self._start_engine():
                self.num_restarts += 1
                self._is_restarting = False
                logger.warning("the engine serves again")
                return True
        return False

    def _delay_s(self) -> float | None:
        """Record a death and return the delay before the next start; None if no restart is left."""
        moment, restarts = time.monotonic(), self._restarts
        self._deaths = [
            *(died_at for died_at in self._deaths if moment - died_at < restarts.window_s),
            moment,
        ]
        if len(self._deaths) > restarts.max_restarts:
            return None
        return float(min(restarts.delay_s * 2 ** (len(self._deaths) - 1), _MAX_DELAY_S))

    async def _start_engine(self) -> bool:
        """Return whether the engine has started; its error is logged, or kept as the failure."""
        try:
            await self._engine.start()
        except UnsupportedOptionError as error:
            self._failure = str(error)
            return False
        except Exception:
            logger.exception("the engine did not start")
            return False
        return True


_DRAIN_TIMED_OUT: Final = (
    ErrorCode.DRAINING,
    (
        "The server is shutting down and could not wait for the request's end (drain_timeout_s); send it to "
        "another replica."
    ),
)

_REFUSALS: Final = {
    Phase.STARTING: (
        ErrorCode.STARTING,
        "The engine is still loading the model; GET /health/ready turns 200 when it serves.",
    ),
    Phase.RESTARTING: (
        ErrorCode.ENGINE_RESTARTING,
        "The engine has died and is being started again; GET /health/ready turns 200 when it serves.",
    ),
    Phase.DRAINING: (
        ErrorCode.DRAINING,
        "The server is shutting down and takes no new requests; send it to another replica.",
    ),
    Phase.DEAD: (
        ErrorCode.ENGINE_DEAD,
        "The engine has stopped and this server must be restarted; its log has the reason.",
    ),
}
