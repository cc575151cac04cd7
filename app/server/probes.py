"""Answers health and metrics requests on a thread of their own, even while the main event loop is blocked.

The thread peeks at the first bytes of all connections, and passes all others to the main loop unread. A probe
is forwarded to the application there; if the loop is blocked, the thread answers from its own state. With TLS
the bytes say nothing, and the main loop gets all connections. Another thread detects, counts and logs stalls
of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import math
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from app.http.errors import error_response
from app.http.lifecycle import Lifecycle, Phase
from app.observability.metrics import Metrics
from app.settings import Settings

logger = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 0.05
_MIN_STALL_S: Final = 1.0
"""Pauses of at least this length are counted and logged."""
_MAX_FRAMES: Final = 12


class EventLoopWatchdog:
    """Watches the event loop of the thread that constructs it."""

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._beat_at = time.monotonic()
        self._reported_s = 0.0  # how much of the current stall ``watch`` has counted

    @property
    def lag_s(self) -> float:
        """The delay of the loop, in seconds beyond its interval."""
        return max(0.0, time.monotonic() - self._beat_at - _HEARTBEAT_S)

    async def beat(self) -> None:
        """Record heartbeats until cancelled; runs in the watched loop."""
        while True:
            with self._lock:
                lag_s, reported_s = self.lag_s, self._reported_s
                self._beat_at, self._reported_s = time.monotonic(), 0.0
            if lag_s >= _MIN_STALL_S:
                self._count(lag_s - reported_s, is_new=not reported_s)
                # If nobody could watch, as while one call held the GIL, this is the first report.
                level = logging.INFO if reported_s else logging.WARNING
                logger.log(level, "the event loop continues after it was blocked for %.1f s", lag_s)
            await asyncio.sleep(_HEARTBEAT_S)

    async def watch(self) -> None:
        """Check the heartbeats until cancelled; runs in another loop, on another thread."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            with self._lock:
                lag_s, reported_s = self.lag_s, self._reported_s
                if lag_s < _MIN_STALL_S:
                    continue
                self._reported_s = lag_s
            self._count(lag_s - reported_s, is_new=not reported_s)
            if not reported_s:
                logger.warning("the event loop has been blocked for %.1f s; requests wait", lag_s)
                if logger.isEnabledFor(logging.DEBUG):
                    logger.debug("the event loop is blocked in %s", self._blocked_at())

    def _count(self, seconds: float, *, is_new: bool) -> None:
        if self._metrics is not None:
            self._metrics.count_stall(seconds, is_new=is_new)

    def _blocked_at(self) -> str:
        """Return the stack of the loop's thread: locations in code, without values."""
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - the standard library's, and documented
        frames = traceback.extract_stack(frame, _MAX_FRAMES) if frame is not None else []
        return " > ".join(f"{Path(entry.filename).name}:{entry.lineno} {entry.name}" for entry in frames)


LIVE: Final = "/health/live"
READY: Final = frozenset({"/health/ready", "/health", "/ping"})
METRICS: Final = "/metrics"
_FIRST_BYTES: Final = (b"GET /health", b"GET /ping ", b"GET /metrics", b"HEAD /health", b"HEAD /metrics")
_STALLED_S: Final = 0.2
"""How long the main loop may be blocked before a probe is answered on this thread."""
_POLL_S: Final = 0.05
_ACCEPT_RETRY_S: Final = 1.0
_MAX_CALLERS: Final = 256
_CALLER_TTL_S: Final = 60.0
"""How long an admitted caller of metrics is cached; only the main loop can check whether a key has ended."""
_CLOSE_S: Final = 5.0
_NO_RESOURCES: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_CALLER: Final = {b"authorization", b"host", b"origin"}
"""Headers that identify an admitted caller of metrics."""


class ProbedComponents(Protocol):
    """The application's components that a server needs."""

    @property
    def settings(self) -> Settings: ...

    @property
    def lifecycle(self) -> Lifecycle: ...

    @property
    def metrics(self) -> Metrics | None:
        """This process's metrics; None if it only exposes those of other processes."""


class ProbeServer:
    """Has the interface of asyncio's servers that uvicorn uses; made in the main loop of ``server``."""

    def __init__(
        self,
        sock: socket.socket,
        server: uvicorn.Server,
        watch: EventLoopWatchdog,
        components: ProbedComponents,
    ) -> None:
        config = server.config
        sock.listen(config.backlog)
        sock.setblocking(False)  # noqa: FBT003 - the library's
        self.sockets = (sock,)
        self._sock = sock
        self._server = server
        self._main = asyncio.get_running_loop()
        self._watch = watch
        self._head_s = components.settings.upload_idle_timeout_s
        self._handing: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        answers = _ProbeApp(config.loaded_app, self._main, watch, components)
        self._config = uvicorn.Config(
            answers, http=config.http, ws="none", lifespan="off", interface="asgi3", log_config=None,
            access_log=False, proxy_headers=False, timeout_keep_alive=config.timeout_keep_alive,
        )  # fmt: skip
        self._config.load()
        self._state = ServerState()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run_loop, name="probes", daemon=True)

    def start(self) -> None:
        """Accept connections from now on."""
        self._thread.start()

    def close(self) -> None:
        """Close the port and the probes' connections; called in the main loop, which waits some seconds."""
        if self._thread.is_alive():
            stopping = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
            try:
                stopping.result(_CLOSE_S)
            except TimeoutError:
                logger.warning("probe connections did not close within %s s", _CLOSE_S)
        self._sock.close()

    async def wait_closed(self) -> None:
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._start_task(self._accept())
        self._start_task(self._watch.watch())
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _start_task(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        """End the tasks and the connections of probes, then the loop; runs in it."""
        for task in [task for task in self._tasks if task is not asyncio.current_task()]:
            task.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()
        self._loop.call_later(2 * _POLL_S, self._loop.stop)

    async def _accept(self) -> None:
        """Accept connections until cancelled; each is assigned once it has sent its first bytes."""
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._sock)
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    continue  # the client has disconnected already
                logger.warning("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            except Exception:
                logger.exception("a connection could not be accepted")
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            connection.setblocking(False)  # noqa: FBT003 - the library's
            self._start_task(self._assign(connection))

    async def _assign(self, connection: socket.socket) -> None:
        """Assign a connection to the probes or to the main loop, once its first bytes arrive."""
        try:
            async with asyncio.timeout(self._head_s):
                await _wait_readable(self._loop, connection)
            beginning = connection.recv(max(map(len, _FIRST_BYTES)), socket.MSG_PEEK)
        except OSError:  # TimeoutError is an OSError
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        if self._server.config.ssl is None and beginning.startswith(_FIRST_BYTES):
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(self._probe_protocol, connection)
        else:
            self._main.call_soon_threadsafe(self._hand_over, connection)

    def _probe_protocol(self) -> asyncio.Protocol:
        self._state.default_headers = self._server.server_state.default_headers
        return _protocol(self._config, self._state, {}, self._loop)

    def _main_protocol(self) -> asyncio.Protocol:
        server = self._server
        return _protocol(server.config, server.server_state, server.lifespan.state, self._main)

    def _hand_over(self, connection: socket.socket) -> None:
        """Begin to serve a connection in the main loop, where this runs."""
        task = self._main.create_task(self._connect_in_main_loop(connection))
        self._handing.add(task)
        task.add_done_callback(self._handing.discard)

    async def _connect_in_main_loop(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client has disconnected
            secure = self._server.config.ssl
            limit_s = None if secure is None else self._head_s
            await self._main.connect_accepted_socket(
                self._main_protocol, connection, ssl=secure, ssl_handshake_timeout=limit_s
            )


def _protocol(
    config: uvicorn.Config, state: ServerState, app_state: dict[str, Any], loop: asyncio.AbstractEventLoop
) -> asyncio.Protocol:
    """Return uvicorn's protocol for a new connection that is served in this loop."""
    protocol: asyncio.Protocol = config.http_protocol_class(
        config=config, server_state=state, app_state=app_state, _loop=loop  # type: ignore[call-arg]  # uvicorn's
    )  # fmt: skip
    return protocol


async def _wait_readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    """Wait until a connection has bytes to read, without reading them."""
    readable = loop.create_future()

    def set_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, set_readable)
    try:
        await readable
    finally:
        loop.remove_reader(connection)


class _ProbeApp:
    """The application on the probes' thread: forwards to the main loop, answers itself if that is blocked."""

    def __init__(
        self,
        app: ASGIApp,
        main: asyncio.AbstractEventLoop,
        watch: EventLoopWatchdog,
        components: ProbedComponents,
    ) -> None:
        self._app = app
        self._main = main
        self._watch = watch
        self._lifecycle = components.lifecycle
        self._metrics = components.metrics
        self._admitted_at: dict[bytes, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the main loop; a probe is answered from here if that loop is blocked."""
        messages: list[Message] = []
        probe_loop = asyncio.get_running_loop()
        is_probe = scope["path"] in {LIVE, *READY, METRICS}

        async def note(message: Message) -> None:
            messages.append(message)

        # A probe's response is buffered until it is complete; until then this thread may still send its own.
        passed = note if is_probe else send

        async def answered() -> None:
            await self._app(scope, _in_loop(receive, probe_loop), _in_loop(passed, probe_loop))

        answering = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answered(), self._main))
        try:
            while not answering.done():
                await asyncio.wait({answering}, timeout=_POLL_S)
                if is_probe and not answering.done() and self._watch.lag_s > _STALLED_S:
                    own_response = await self._own_response(scope)
                    if own_response is not None:
                        await own_response(scope, receive, send)
                        return
            await answering
        finally:
            answering.cancel()
        for message in messages:
            if message["type"] == "http.response.start":
                self._remember_admitted(scope, message)
            await send(message)

    async def _own_response(self, scope: Scope) -> Response | None:
        """Return a response from state available without the main loop; None if only that loop can answer."""
        if scope["path"] == METRICS:
            if (
                self._metrics is None
                or self._admitted_at.get(_caller_digest(scope), -math.inf) < time.monotonic() - _CALLER_TTL_S
            ):
                return None
            return Response(await self._metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
        refusal = self._lifecycle.refusal()
        if refusal is not None and (scope["path"] in READY or self._lifecycle.phase is Phase.DEAD):
            return error_response(refusal)
        return JSONResponse({"status": self._lifecycle.phase})

    def _remember_admitted(self, scope: Scope, head: Message) -> None:
        """Record whether the caller may see the metrics, for use while the main loop is blocked."""
        if scope["path"] != METRICS:
            return
        caller = _caller_digest(scope)
        self._admitted_at.pop(caller, None)
        if head["status"] == 200:
            self._admitted_at[caller] = time.monotonic()
            while len(self._admitted_at) > _MAX_CALLERS:
                del self._admitted_at[next(iter(self._admitted_at))]


def _caller_digest(scope: Scope) -> bytes:
    """Return a hash of the headers that decide whether a caller may see the metrics."""
    identifying = sorted((name, value) for name, value in scope["headers"] if name in _CALLER)
    return hashlib.sha256(repr(identifying).encode()).digest()


def _in_loop(
    call: Callable[..., Awaitable[Any]], loop: asyncio.AbstractEventLoop
) -> Callable[..., Awaitable[Any]]:
    """Return an ASGI callable that runs ``call`` in another thread's event loop."""

    async def crossing(*args: Any) -> Any:
        async def called() -> Any:
            return await call(*args)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), loop))

    return crossing
