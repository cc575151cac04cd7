"""Surrounds each request, in one middleware: context and record, hosts and origins, admission, errors.

``BaseHTTPMiddleware`` would cost a task group per request and hide disconnects from the routes below.

While the server has no keys and admits local callers, ``Host`` and ``Origin`` are checked on every route. A
page in a local browser can make a name of its own resolve to this machine (DNS rebinding), so the host name
of a request must be one of this machine's, and other origins are rejected. With keys, the key alone
authorizes a request. Starlette's ``TrustedHostMiddleware`` is no substitute: it takes ``127.0.0.1:x@evil``
for ``127.0.0.1``, refuses IPv6 addresses, and does not look at origins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Final, NamedTuple

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api_schemas.errors import ApiError, ErrorCode, excerpt
from app.addresses import is_loopback
from app.http.contexts import RequestContext, begin_context
from app.http.errors import error_response, internal_error, refuse
from app.http.lifecycle import Lifecycle, Phase
from app.http.vllm_routes import OUTSIDE_V1
from app.settings import Settings
from nnsight_engine.core.work_context import working_for

logger = logging.getLogger(__name__)

API_PREFIX: Final = "/v1/"
RESULTS_PREFIX: Final = "/v1/results/"
STATUS_PATH: Final = "/v1/status"
JOBS_PATH: Final = "/v1/jobs"
_EVENTS: Final = "/events"
_RERUN: Final = "/rerun"
_CONNECTIONS: Final = {"http", "websocket"}
_POLICY_VIOLATION: Final = 1008
_TRY_AGAIN_LATER: Final = 1013
_STARTS: Final = {"http.response.start", "websocket.http.response.start"}
_SOCKET_ANSWERS: Final = {
    "websocket.accept": HTTPStatus.SWITCHING_PROTOCOLS,
    "websocket.close": HTTPStatus.FORBIDDEN,
    "websocket.http.response.body": HTTPStatus.FORBIDDEN,
}
"""The status of responses whose messages contain none."""

Headers = Sequence[tuple[bytes, bytes]]
Recording = Callable[[Scope, RequestContext], AbstractAsyncContextManager[Headers]]
"""Surrounds one request; the value of its block are headers for the response."""


@contextlib.asynccontextmanager
async def unrecorded(_scope: Scope, _context: RequestContext) -> AsyncIterator[Headers]:
    yield ()


@dataclasses.dataclass(frozen=True, slots=True)
class RequestMiddleware:
    """Admits API requests while the server can serve them, and counts them until their last byte.

    ``request_timeout_s`` applies to POST requests only; ``hosts`` is None where every name is accepted.
    """

    app: ASGIApp
    lifecycle: Lifecycle
    request_timeout_s: float
    hosts: HostRules | None
    recording: Recording = unrecorded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in _CONNECTIONS:
            await self.app(scope, receive, send)
            return
        _accept_other_header(scope)
        context = begin_context(scope)
        with working_for(context):
            async with self.recording(scope, context) as headers:
                await self._admit(scope, context, _Exchange(context, receive, send, headers))

    async def _admit(self, scope: Scope, context: RequestContext, exchange: _Exchange) -> None:
        """Pass a request on, or answer it with the reason why the server does not serve it now."""
        path, method = str(scope["path"]).removeprefix(scope.get("root_path", "")), scope.get("method", "GET")
        refusal = None if self.hosts is None else await self.hosts.refusal(HTTPConnection(scope))
        if refusal is not None:
            await refuse(refusal, scope, exchange.receive, exchange.send, code=_POLICY_VIOLATION)
        elif path == STATUS_PATH or not (path.startswith(API_PREFIX) or path in OUTSIDE_V1):
            await self._answer(scope, context, exchange)
        elif (refusal := self._refusal(path, method)) is not None:
            await refuse(refusal, scope, exchange.receive, exchange.send, code=_TRY_AGAIN_LATER)
        elif path.startswith(JOBS_PATH) and path.endswith(_EVENTS):
            # A client that follows a job is not counted, or the drain would wait for it while it waits for
            # the job; it reconnects to the next server.
            await self._answer(scope, context, exchange)
        else:
            with self.lifecycle.serving(context.deadline):
                if method == "POST":  # other methods only look things up or fetch stored content
                    context.deadline.limit(self.request_timeout_s)
                await self._answer(scope, context, exchange)

    def _refusal(self, path: str, method: str) -> ApiError | None:
        """Return the error if the server's phase does not allow this request."""
        # Jobs outlive engines: job requests that start no work are served in every phase.
        if f"{path}/".startswith(f"{JOBS_PATH}/"):
            begins_work = method == "POST" and (path == JOBS_PATH or path.endswith(_RERUN))
            return self.lifecycle.refusal() if begins_work else None
        # A result outlives its request: a client served just before the drain may still fetch it.
        if path.startswith(RESULTS_PREFIX) and self.lifecycle.phase is not Phase.STARTING:
            return None
        return self.lifecycle.refusal()

    async def _answer(self, scope: Scope, context: RequestContext, exchange: _Exchange) -> None:
        """Have the application answer; an unexpected error becomes a response while none has begun."""
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            logger.info("client disconnected: %s %s", scope.get("method", "WEBSOCKET"), scope["path"])
        except Exception:
            # After the status was sent, no error can be reported; the server closes the connection.
            if context.record.status is not None or scope["type"] == "websocket":
                raise
            logger.exception("unhandled error: %s %s", scope["method"], scope["path"])
            await error_response(internal_error())(scope, exchange.receive, exchange.send)
        finally:
            if context.admitted is not None:
                context.admitted.running.close()
                context.admitted.bill()
            if context.received is not None:
                context.received.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Exchange:
    """The messages of one request, which its record counts."""

    context: RequestContext
    inner_receive: Receive
    inner_send: Send
    headers: Headers

    async def receive(self) -> Message:
        message = await self.inner_receive()
        if message["type"] == "http.request":
            record = self.context.record
            record.request_bytes += len(message.get("body", b""))
            record.begun_s = time.perf_counter()
        return message

    async def send(self, message: Message) -> None:
        """Pass a message of the response on; its head gets the headers of the record and of the limits."""
        kind, context = message["type"], self.context
        if kind == "http.response.body":
            context.record.response_bytes += len(message.get("body", b""))
            context.is_answered = not message.get("more_body", False)
        elif kind in _STARTS:
            context.record.status = message["status"]
            limits = {} if context.admitted is None else context.admitted.headers
            limit_headers = [(name.encode(), value.encode()) for name, value in limits.items()]
            message["headers"] = [*message.get("headers", ()), *self.headers, *limit_headers]
        elif kind in _SOCKET_ANSWERS:
            context.record.status = context.record.status or _SOCKET_ANSWERS[kind]
            context.is_answered = True
        await self.inner_send(message)


def _accept_other_header(scope: Scope) -> None:
    """Accept a key in the header that Anthropic's clients send it in."""
    headers = dict(scope.get("headers", ()))
    if b"x-api-key" in headers and b"authorization" not in headers:
        bearer = (b"authorization", b"Bearer " + headers[b"x-api-key"])
        scope["headers"] = [*scope["headers"], bearer]


_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", re.ASCII | re.IGNORECASE)
_ORIGIN: Final = re.compile(r"https?://(.+)", re.ASCII | re.IGNORECASE)
_DEFAULT_PORTS: Final = {"80", "443"}


class Authority(NamedTuple):
    """A host, in lower case and IPv6 without brackets, and its port, empty for a default one."""

    name: str
    port: str


class HostRules:
    """Which hosts and origins a server without keys accepts; asks for keys only before it rejects."""

    def __init__(
        self,
        settings: Settings,
        are_keys_required: Callable[[], Awaitable[bool]],
        allowed_origins: Collection[str] = (),
    ) -> None:
        self._allowed_origins = allowed_origins
        # Without keys the server listens on loopback only; other host names are checked only there.
        self._checks_name = is_loopback(settings.host)
        self._own_names = {name.strip().lower() for name in settings.allowed_hosts.split(",")} - {""}
        self._are_keys_required = are_keys_required
        self._has_keys = False

    async def refusal(self, connection: HTTPConnection) -> ApiError | None:
        """Return the error for a host or an origin that is not accepted; None also once there are keys."""
        refusal = self._refusal(connection)
        return None if refusal is None or await self._requires_keys() else refusal

    def _refusal(self, connection: HTTPConnection) -> ApiError | None:
        # A request without a Host header does not come from a browser.
        if self._checks_name and "host" in connection.headers and not self._is_own(host_of(connection)):
            return ApiError(
                ErrorCode.HOST_NOT_ALLOWED,
                "A server without keys accepts only host names of its own machine, and this request has the "
                f"Host {excerpt(connection.headers.get('host'))}: use http://localhost, or ask the operator "
                "to add it to allowed_hosts (NNSIGHT_ENGINE_ALLOWED_HOSTS) or to create keys.",
            )
        is_allowed = connection.headers.get("origin") in self._allowed_origins
        if not is_allowed and is_cross_origin(connection):
            return ApiError(
                ErrorCode.ORIGIN_NOT_ALLOWED,
                "A server without keys rejects requests from pages of other origins, and this request has "
                f"the Origin {excerpt(connection.headers.get('origin'))}: open the page from this server, "
                "call it from outside a browser, or ask the operator for --allowed-origins or for keys.",
            )
        return None

    def _is_own(self, host: Authority | None) -> bool:
        return host is not None and (is_loopback(host.name) or host.name in self._own_names)

    async def _requires_keys(self) -> bool:
        if not self._has_keys:  # once keys exist, that does not change
            try:
                self._has_keys = await self._are_keys_required()
            except Exception:
                logger.exception(
                    "the keys could not be read: the request is refused as on a server without keys"
                )
        return self._has_keys


def host_of(connection: HTTPConnection) -> Authority | None:
    """Return the host in the request's ``Host`` header; None if it is malformed, missing or repeated."""
    values = connection.headers.getlist("host")
    return _authority(values[0]) if len(values) == 1 else None


def is_cross_origin(connection: HTTPConnection) -> bool:
    """Return whether the ``Origin`` header is malformed or names another host or port than ``Host``."""
    values = connection.headers.getlist("origin")
    if not values:
        return False
    origin = _ORIGIN.fullmatch(values[0])
    page = None if origin is None or len(values) > 1 else _authority(origin[1])
    return page is None or page != host_of(connection)


def _authority(text: str) -> Authority | None:
    """Return the host and port; None for anything else, including user information (``127.0.0.1@evil``)."""
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        return None
    name, port = match[1].lower().strip("[]"), (match[2] or "").lstrip("0")
    return Authority(name, "" if port in _DEFAULT_PORTS else port)
