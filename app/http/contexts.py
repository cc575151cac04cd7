"""The context of a request, or of a job's run: sender, rights, deadline and ids, in the ASGI scope.

The middleware of ``gate`` creates one; each layer completes the fields that it learns. Code that waits for a
request also waits for its deadline, which ends it on a timeout, for a client that reads nothing, or at a
shutdown; the client, still connected, gets the reason. Cancellation is asyncio's own and arrives once, so
that an engine may await in ``finally``; anyio's task groups, which starlette's streaming response uses, would
cancel those awaits too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import Receive, Scope

from api_schemas.errors import ApiError, ErrorCode
from app.admission.rates import Admitted
from app.audit import Record
from app.auth.principal import Principal
from app.http.large_bodies import LargeBodyReader
from app.limits.limit import Spending
from nnsight_engine.core.work_context import WorkContext


class RequestDeadline:
    """The deadline of one request; ``reached`` resolves with the reason when the request is ended."""

    def __init__(self) -> None:
        """Must be called inside the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.Timeout | None = None
        self.reached: asyncio.Future[ApiError] = self._loop.create_future()

    @property
    def error(self) -> ApiError | None:
        return self.reached.result() if self.reached.done() else None

    def end(self, error: ApiError) -> None:
        """End the request now; only the first reason is kept."""
        if self.reached.done():
            return
        self.reached.set_result(error)
        if self._pause is not None and not self._pause.expired():
            self._pause.reschedule(self._loop.time())

    def limit(self, limit_s: float) -> None:
        """End the request with ``request_timed_out`` after ``limit_s`` seconds."""
        self._timer = self._loop.call_later(limit_s, self.end, _timed_out(limit_s))

    @contextlib.asynccontextmanager
    async def pause(self, max_s: float | None) -> AsyncIterator[None]:
        """Bound a wait for the request's client in the block; blocks must not overlap.

        Raises:
            TimeoutError: The block took longer than ``max_s`` seconds, or the request was ended.
        """
        async with asyncio.timeout(0 if self.reached.done() else max_s) as pause:
            self._pause = pause
            try:
                yield
            finally:
                self._pause = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _timed_out(limit_s: float) -> ApiError:
    return ApiError(
        ErrorCode.REQUEST_TIMED_OUT,
        f"A request may take {limit_s:g} s (request_timeout_s), and this one was ended then; request less at "
        "once, or send a trace as a job.",
    )


T = TypeVar("T")


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], deadline: RequestDeadline | None = None
) -> T:
    """Run ``work``; cancel it, wait for it, and raise if the client disconnects or the deadline is reached.

    The request's body must have been read: other messages are discarded.
    """
    return (await start_while_connected(receive, work, deadline)).result()


async def start_while_connected(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    deadline: RequestDeadline | None = None,
    patience_s: float | None = None,
) -> asyncio.Task[T]:
    """Run ``work`` as ``while_connected`` does, until it is done or ``patience_s`` is over; raises its error.

    Return its task, which after ``patience_s`` still runs, and is then the caller's.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(disconnected(receive))
    waited_for: list[asyncio.Future[Any]] = [working, watching]
    if deadline is not None:
        waited_for.append(deadline.reached)
    is_kept = False
    try:
        done, _ = await asyncio.wait(waited_for, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        is_kept = not done or working in done
        if working in done:
            working.result()  # raises its error
        if is_kept:
            return working
        if deadline is not None and deadline.error is not None:
            raise deadline.error
        raise ClientDisconnect
    finally:
        watching.cancel()
        if not is_kept:
            working.cancel()
        await asyncio.gather(watching, *([] if is_kept else [working]), return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects; discards other messages."""
    while (await receive())["type"] != "http.disconnect":
        pass


KEY: Final = "nnsight_engine.request"
"""The context's key in the scope."""


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestContext(WorkContext):
    """Must be created inside the running event loop.

    ``principal``, ``received`` (the bytes of its body) and ``bodies`` are None before authentication,
    ``admitted`` if nothing is counted. ``sent_model`` is the name as it was sent, for the answer, if it names
    a preset. ``is_answered`` becomes true with the last byte of the response.
    """

    record: Record
    deadline: RequestDeadline = dataclasses.field(default_factory=RequestDeadline)
    principal: Principal | None = None
    admitted: Admitted | None = None
    received: Spending | None = None
    bodies: LargeBodyReader | None = None
    sent_model: str | None = None
    is_answered: bool = False

    def identify(self, caller: Principal, connection: HTTPConnection) -> None:
        self.principal, self.tenant = caller, caller.tenant
        self.meter.key_id = caller.key_id
        self.record.identify(caller, connection)

    def note_presets(self, presets: Sequence[str]) -> None:
        """Record the versions of presets that the request uses, in order, for the log and the engine."""
        self.presets = tuple(presets)
        self.record.details["presets"] = list(presets)

    @property
    def caller(self) -> Principal:
        """The authenticated caller; RuntimeError if there is none, since nothing may be done for it."""
        if self.principal is None:
            raise RuntimeError("a request is served before its caller is authenticated")
        return self.principal

    @property
    def traceparent(self) -> str:
        """The W3C ``traceparent`` of its span; empty where no spans are recorded."""
        return (self.trace_headers or {}).get("traceparent", "")


def begin_context(scope: Scope) -> RequestContext:
    """Make the context of a request, or of a WebSocket, and put it into the scope."""
    context = scope[KEY] = RequestContext(record=Record(str(scope.get("method", "WEBSOCKET"))))
    return context


def context_of(scope: Scope) -> RequestContext:
    context: RequestContext = scope[KEY]
    return context


def note_error(scope: Scope, code: str) -> None:
    """Record the error that a request ends with, if it is recorded: the thread of probes has no contexts."""
    context: RequestContext | None = scope.get(KEY)
    if context is not None:
        context.record.error = code
