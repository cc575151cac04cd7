"""Streams HTTP between a client and a replica, with backpressure in both directions.

JSON bodies are buffered, because routing depends on them; such a request may be sent again to another replica
if the first one rejected it or was unreachable.

Forwards a client's WebSocket to a replica, or to all of them if the replica that runs a job is unknown.

With ``local=true``, any replica may call the client, another one after a failure. The first one sends events,
each may send calls, and all receive the answers, which only the calling replica waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
from multidict import CIMultiDict
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from yarl import URL

from api_schemas.errors import ErrorCode
from app.http.bodies import read_bytes, stream_bytes
from app.http.contexts import context_of, while_connected
from app.replicas.protocol import ReplicaAddress, replica_lost
from app.server.sockets import detect_lost_peer
from app.services.streaming import ClosingStream, last_events
from app.settings import Settings

REPLICA_HEADER: Final = "x-nnsight-replica"
_CONNECT_S: Final = 5.0
_STREAMS: Final = {"/v1/completions", "/v1/chat/completions"}
"""Paths with event streams whose last event may report an error."""
_EVENTS: Final = "text/event-stream"
_EVENT_END: Final = b"\n\n"
_MAX_REFUSAL_BYTES: Final = 64 * 1024
_PIECE_BYTES: Final = 64 * 1024
_REFUSALS: Final = {ErrorCode.STARTING.value, ErrorCode.DRAINING.value, ErrorCode.ENGINE_RESTARTING.value}
"""Error codes after which another replica may run the request, since this one has done no work for it."""
_UNAVAILABLE: Final = 503
_SAFE_METHODS: Final = {"GET", "HEAD", "OPTIONS"}
_HOP_BY_HOP_HEADERS: Final = {
    "connection", "date", "expect", "forwarded", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "server", "te", "trailer", "transfer-encoding", "upgrade", "x-forwarded-for", "x-forwarded-host",
    "x-forwarded-proto", REPLICA_HEADER,
}  # fmt: skip
"""Hop-by-hop headers, and headers that only the front may set."""
_CREDENTIAL_HEADERS: Final = {"authorization", "host"}
"""Headers that identify the caller."""
_REFUSAL_HEADERS: Final = {"retry-after", "www-authenticate"}
_JSON: Final = "application/json"


class NotAcceptedError(Exception):
    """The request may be sent to another replica; ``answer`` is None if this one could not be reached."""

    def __init__(self, answer: Response | None = None) -> None:
        super().__init__()
        self.answer = answer


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    address: ReplicaAddress
    status: int
    text: str
    headers: Mapping[str, str]

    def response(self) -> Response:
        headers = {**self.headers, REPLICA_HEADER: self.address.name}
        return Response(self.text, self.status, headers, media_type=_JSON)


class ForwardedRequest:
    """A forwarded request, streamed once if ``body`` is None; ``error`` is what ended a stream early."""

    def __init__(self, request: Request, path: str, body: bytearray | None) -> None:
        self.request = request
        self.path = path
        self.body = body
        self.error: Exception | None = None
        self._is_read = asyncio.Event()
        if body is not None:
            self._is_read.set()

    async def receive(self) -> Message:
        """Receive what the client sends after the body, which tells that it has disconnected."""
        await self._is_read.wait()
        if self.error is not None:  # reported by the code that sends the body
            await asyncio.Event().wait()
        return await self.request.receive()

    async def pieces(self, settings: Settings) -> AsyncGenerator[bytes | memoryview, None]:
        """Yield the body for a replica: from memory, or, once only, as the client sends it."""
        if self.body is not None:
            view = memoryview(self.body)
            for start in range(0, len(view), _PIECE_BYTES):
                yield view[start : start + _PIECE_BYTES]
            return
        # The form of a dictionary has more parts than its weights.
        form_bytes = settings.max_dictionary_bytes + settings.max_body_bytes
        max_bytes = max(settings.max_trace_request_bytes, form_bytes)
        try:
            async for chunk in stream_bytes(self.request, max_bytes, settings.upload_idle_timeout_s):
                yield chunk
        except Exception as error:
            self.error = error
            raise
        finally:
            self._is_read.set()

    def headers(self) -> CIMultiDict[str]:
        """Return the headers for a replica: the client's, and those that only the front may set."""
        kept_headers = [
            (name, value) for name, value in self.request.headers.items() if name not in _HOP_BY_HOP_HEADERS
        ]
        headers = CIMultiDict(kept_headers)
        if self.body is not None:
            headers.popall("content-length", None)
            if self.body or self.request.method not in _SAFE_METHODS:
                headers["content-length"] = str(len(self.body))
        headers.update(forwarded_headers(self.request))
        return headers


class Relay:
    def __init__(self, settings: Settings) -> None:
        """Create the session, without connections; called inside the running event loop."""
        self._settings = settings
        self._session = aiohttp.ClientSession(
            # One connection per request: no part of a request can be mistaken for the next one's beginning.
            connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_new_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            auto_decompress=False,
            read_bufsize=_PIECE_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def read(self, request: Request, path: str) -> ForwardedRequest:
        """Return a request to be forwarded, with its body if that is buffered."""
        if request.method in _SAFE_METHODS:
            return ForwardedRequest(request, path, bytearray())
        if not is_buffered(request):
            return ForwardedRequest(request, path, None)
        settings = self._settings
        body = await read_bytes(request, settings.max_body_bytes, settings.upload_idle_timeout_s)
        return ForwardedRequest(request, path, body)

    async def answer(self, sent: ForwardedRequest, address: ReplicaAddress) -> ClosingStream:
        """Send a request to a replica, and return its response.

        NotAcceptedError: another replica may be tried. ApiError: ``replica_lost`` and others.
        ClientDisconnect.
        """
        deadline = context_of(sent.request.scope).deadline
        try:
            response = await while_connected(sent.receive, self._send_request(sent, address), deadline)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotAcceptedError from error
        except (aiohttp.ClientError, OSError) as error:
            if sent.error is not None:
                raise sent.error from error
            if sent.request.method in _SAFE_METHODS:
                raise NotAcceptedError from error
            raise replica_lost(address.name) from error
        is_event_stream = sent.path in _STREAMS and response.headers.get("content-type", "").startswith(
            _EVENTS
        )
        source = _response_pieces(response, address, ends_with_error=is_event_stream)
        if response.status == _UNAVAILABLE and sent.body is not None and _is_short(response):
            body = await _read_body(response, address)
            source = _single_piece(body)
            if is_refusal(response.status, body):
                raise NotAcceptedError(self._stream(response, source, address, is_event_stream=False))
        return self._stream(response, source, address, is_event_stream=is_event_stream)

    async def get(self, address: ReplicaAddress, path: str, request: Request) -> ReplicaAnswer | None:
        """Return the answer to a GET with the caller's credentials and address; None if there is none."""
        headers = {name: value for name, value in request.headers.items() if name in _CREDENTIAL_HEADERS}
        headers.update(forwarded_headers(request))
        try:
            async with self._session.get(f"{address.url}{path}", headers=headers) as response:
                response_headers = {
                    name: value
                    for name, value in response.headers.items()
                    if name.lower() in _REFUSAL_HEADERS
                }
                return ReplicaAnswer(address, response.status, await response.text(), response_headers)
        except (aiohttp.ClientError, OSError):
            return None

    async def _send_request(self, sent: ForwardedRequest, address: ReplicaAddress) -> aiohttp.ClientResponse:
        request = sent.request
        query = request.scope["query_string"].decode("latin-1")
        path = quote(sent.path, safe="/:@!$&'()*+,;=~")
        has_body = sent.body is None or len(sent.body) > 0
        return await self._session.request(
            request.method,
            URL(f"{address.url}{path}{'?' if query else ''}{query}", encoded=True),
            headers=sent.headers(),
            data=sent.pieces(self._settings) if has_body else None,
            allow_redirects=False,
        )

    def _stream(
        self,
        response: aiohttp.ClientResponse,
        source: AsyncGenerator[bytes, None],
        address: ReplicaAddress,
        *,
        is_event_stream: bool,
    ) -> ClosingStream:
        """Return a replica's response as the answer to the client, named after the replica."""

        async def close() -> None:
            response.close()

        answer = ClosingStream(
            source,
            media_type="",
            status_code=response.status,
            on_close=close,
            stall_s=self._settings.client_stall_timeout_s,
            final_event=last_events if is_event_stream else None,
        )
        answer.raw_headers = [
            (name.lower(), value)
            for name, value in response.raw_headers
            if name.decode("latin-1").lower() not in _HOP_BY_HOP_HEADERS
        ]
        answer.headers[REPLICA_HEADER] = address.name
        return answer


def is_buffered(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return request.method not in _SAFE_METHODS and kind == _JSON


def is_refusal(status: int, body: bytes) -> bool:
    """Return whether a replica has done no work for the request, so that another one may run it."""
    return status == _UNAVAILABLE and _error_code(body) in _REFUSALS


def forwarded_headers(connection: HTTPConnection) -> dict[str, str]:
    """Return headers that tell replicas the client's address; those set by the client are ignored."""
    address = "" if connection.client is None else connection.client.host
    return {"x-forwarded-for": address, "x-forwarded-proto": connection.url.scheme}


def _new_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    detect_lost_peer(sock)
    return sock


async def _response_pieces(
    response: aiohttp.ClientResponse, address: ReplicaAddress, *, ends_with_error: bool
) -> AsyncGenerator[bytes, None]:
    """Yield a response; if the replica fails in between, end with an error event or abort."""
    is_between_events = True
    try:
        async for piece in response.content.iter_any():
            yield piece
            is_between_events = piece.endswith(_EVENT_END)
    except (aiohttp.ClientError, OSError) as error:
        if not ends_with_error or not is_between_events:
            raise ClientDisconnect from error  # which cuts the client's connection
        yield last_events(replica_lost(address.name))
    finally:
        response.close()


async def _single_piece(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


async def _read_body(response: aiohttp.ClientResponse, address: ReplicaAddress) -> bytes:
    try:
        return await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise replica_lost(address.name) from error


def _is_short(response: aiohttp.ClientResponse) -> bool:
    return response.content_length is not None and response.content_length <= _MAX_REFUSAL_BYTES


def _error_code(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.code
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


class _Error(msgspec.Struct):
    code: str


class _ErrorBody(msgspec.Struct):
    error: _Error


_CONNECT_TIMEOUT_S: Final = 10.0
_OTHERS_CONNECT_TIMEOUT_S: Final = 2.0
"""Time limit for connecting to the other replicas; the client waits meanwhile."""
_GOING_AWAY, _TRY_AGAIN_LATER = 1001, 1013
_NO_CODE: Final = {1005, 1006, 1015}
"""Close codes that mean that no code was received."""
_HANDSHAKE_HEADERS: Final = {"connection", "host", "upgrade", "x-forwarded-for", "x-forwarded-proto"}
_DROPPED_HEADERS: Final = {"connection", "content-length", "date", "server", "transfer-encoding"}


async def relay_socket(
    websocket: WebSocket, path: str, address: ReplicaAddress, others: Sequence[ReplicaAddress]
) -> None:
    """Forward a WebSocket, not accepted yet, until either side closes it; NotAcceptedError if refused.

    ``others`` get the client's answers too, and may send it calls.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            leased = await stack.enter_async_context(_connection(websocket, path, address))
        except InvalidStatus as error:
            denial = _denial(error)
            if is_refusal(denial.status_code, bytes(denial.body)):
                raise NotAcceptedError(denial) from error
            await reject(websocket, denial)
            return
        except (OSError, TimeoutError, WebSocketException) as error:
            raise NotAcceptedError from error
        detect_lost_peer(leased.transport.get_extra_info("socket"))

        async def join(other: ReplicaAddress) -> ClientConnection | None:
            try:
                connection = _connection(websocket, path, other, timeout_s=_OTHERS_CONNECT_TIMEOUT_S)
                joined = await stack.enter_async_context(connection)
            except (OSError, TimeoutError, WebSocketException):
                return None
            detect_lost_peer(joined.transport.get_extra_info("socket"))
            return joined

        further = [other for other in await asyncio.gather(*map(join, others)) if other is not None]
        await websocket.accept(leased.subprotocol, [(REPLICA_HEADER.encode(), address.name.encode())])
        code = await _forward_messages(websocket, leased, further)
        if code is not None:
            # The client may have disconnected.
            with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
                await websocket.close(_GOING_AWAY if code in _NO_CODE else code)


async def reject(websocket: WebSocket, response: Response) -> None:
    """Reject a WebSocket with a response, or without one if Ray Serve's server cannot send it."""
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        await websocket.send_denial_response(response)
    else:
        await websocket.close(_TRY_AGAIN_LATER)


def _connection(
    websocket: WebSocket, path: str, address: ReplicaAddress, *, timeout_s: float = _CONNECT_TIMEOUT_S
) -> connect:
    """Return a WebSocket to a replica, to be entered, with the client's headers, host and address."""
    # The replica checks the host name that the client used.
    host = websocket.headers.get("host", "localhost")
    query = websocket.url.query
    target = urlsplit(address.url)
    dropped = (*_HANDSHAKE_HEADERS, REPLICA_HEADER)
    headers = [
        (name, value)
        for name, value in websocket.headers.items()
        if name not in dropped and not name.startswith("sec-websocket-")
    ]
    headers += forwarded_headers(websocket).items()
    return connect(
        f"ws://{host}{quote(path, safe='/:@')}{'?' if query else ''}{query}",
        host=target.hostname,
        port=target.port,
        additional_headers=headers,
        user_agent_header=None,
        compression=None,
        max_size=None,  # limited by the replica
        ping_interval=None,  # the client and the replica ping each other; TCP keep-alive detects a lost host
        open_timeout=timeout_s,
        proxy=None,
    )


async def _forward_messages(
    websocket: WebSocket, leased: ClientConnection, further: Sequence[ClientConnection]
) -> int | None:
    """Forward messages; return the close code of ``leased``, the first replica; None if the client closed."""
    listening = asyncio.create_task(_forward_to_replicas(websocket, leased, further))
    sending = asyncio.create_task(_forward_to_client(websocket, leased))
    receiving_others = [asyncio.create_task(_send_calls(websocket, other)) for other in further]
    try:
        finished, _ = await asyncio.wait([listening, sending], return_when=asyncio.FIRST_COMPLETED)
        return sending.result() if sending in finished and listening not in finished else None
    except WebSocketDisconnect:
        return None  # raised by a send
    finally:
        for task in (listening, sending, *receiving_others):
            task.cancel()
        await asyncio.gather(listening, sending, *receiving_others, return_exceptions=True)


async def _forward_to_replicas(
    websocket: WebSocket, leased: ClientConnection, further: Sequence[ClientConnection]
) -> None:
    """Forward the client's messages until it disconnects: text to the first replica, answers to all."""
    while (message := await websocket.receive())["type"] != "websocket.disconnect":
        text, data = message.get("text"), message.get("bytes")
        targets = (leased,) if data is None else (leased, *further)
        for target in targets:
            with contextlib.suppress(ConnectionClosed):  # handled by its reader
                await target.send(text or "" if data is None else data)


async def _forward_to_client(websocket: WebSocket, source: ClientConnection) -> int:
    """Forward a replica's messages until it closes the connection, and return its close code."""
    with contextlib.suppress(ConnectionClosed):
        async for message in source:
            if isinstance(message, str):
                await websocket.send_text(message)
            else:
                await websocket.send_bytes(message)
    return source.close_code or _GOING_AWAY


async def _send_calls(websocket: WebSocket, source: ClientConnection) -> None:
    """Forward the calls of a replica other than the first."""
    with contextlib.suppress(ConnectionClosed):
        async for message in source:
            if isinstance(message, bytes):  # the first replica sends the job's events
                await websocket.send_bytes(message)


def _denial(error: InvalidStatus) -> Response:
    """Return a replica's refusal of a WebSocket as a response for the client."""
    response = error.response
    headers = {
        name: value for name, value in response.headers.raw_items() if name.lower() not in _DROPPED_HEADERS
    }
    return Response(bytes(response.body or b""), response.status_code, headers)
