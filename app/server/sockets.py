"""The server's listening socket, and an HTTP protocol with limits on a request's head.

``Forwarded`` (RFC 7239) is translated to the ``X-Forwarded`` headers of uvicorn, which decides about trust. A
proxy sets one kind of header and passes the other on unchanged, as forged by a client: only the kind that the
operator configured is read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
from typing import Any, ClassVar, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api_schemas.errors import ApiError, ErrorCode
from app.http.errors import error_bytes

_FOR: Final = b"x-forwarded-for"
_PROTO: Final = b"x-forwarded-proto"
_NAME: Final = b"forwarded"
_OTHERS: Final = frozenset({_FOR, _PROTO, _NAME})
_PAIR: Final = re.compile(r'\s*+(?:(\w+)=("(?:[^"\\]|\\.)*"|[^;,"\s]*))?\s*+(;|,|\Z)')
_SECURE: Final = {"http", "https"}

Headers = list[tuple[bytes, bytes]]


def as_x_forwarded(headers: Headers) -> Headers:
    """Return the translated headers; without a well-formed one the client is the peer of the connection."""
    text = ",".join(value.decode("latin-1") for name, value in headers if name == _NAME)
    other_headers = [(name, value) for name, value in headers if name not in _OTHERS]
    hops = _hops(text)
    if not hops:
        return other_headers
    addresses = ", ".join(_address(hop.get("for", "unknown")) for hop in hops)
    proto = hops[-1].get("proto", "").lower()
    forwarded = [(_FOR, addresses.encode("latin-1"))]
    return [*other_headers, *forwarded, *([(_PROTO, proto.encode())] if proto in _SECURE else [])]


def _hops(text: str) -> list[dict[str, str]]:
    """Return the parameters of each proxy in a ``Forwarded`` header, client first; empty if malformed."""
    hops: list[dict[str, str]] = [{}]
    position = 0
    while position < len(text):
        match = _PAIR.match(text, position)
        if match is None:
            return []
        name, value, separator = match.groups()
        if name:
            hops[-1][name.lower()] = re.sub(r"\\(.)", r"\1", value[1:-1]) if value[:1] == '"' else value
        if separator == ",":
            hops.append({})
        position = match.end()
    return [hop for hop in hops if hop]


def _address(node: str) -> str:
    """Return an address without its port, and an IPv6 one without brackets."""
    if node.startswith("["):
        return node[1:].partition("]")[0]
    return node.partition(":")[0] if node.count(":") == 1 else node


MAX_HEAD_BYTES: Final = 64 * 1024
_LINGER_S: Final = 2.0
"""How long a client whose head was rejected has to read the response."""
_TOO_LARGE: Final = (
    "A request's line and headers may have {} bytes together, and this one's have more; send long values in "
    "the body."
)
_TOO_MANY: Final = "A request may have {} headers, and this one has more."
_MS: Final = 1000
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Idle seconds before the first keep-alive probe, seconds between probes, and the number of unanswered
probes.
"""


def listening_socket(config: uvicorn.Config, *, stall_s: float = 60.0) -> socket.socket:
    """Bind the address of ``config``, with TCP_NODELAY set on all connections.

    uvicorn's own socket names no protocol, so asyncio leaves Nagle's algorithm on: small pieces of a stream
    then wait for the client's delayed acknowledgement, 40 ms on Linux. ``stall_s`` bounds unsent and
    unacknowledged data, which would otherwise stay in memory after the request.
    """
    sock = config.bind_socket()
    if config.uds:
        return sock
    # Accepted connections inherit all of these options.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    detect_lost_peer(sock, stall_s=stall_s)
    return sock


def detect_lost_peer(sock: socket.socket, *, stall_s: float = 60.0) -> None:
    """Let the kernel close connections whose peer vanished; those of a listening socket inherit it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_KEEP_ALIVE, "TCP_USER_TIMEOUT": round(stall_s * _MS)}.items():
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclasses.dataclass(frozen=True, slots=True)
class HeadLimits:
    """``max_bytes`` bounds a request line with its headers, and a body's framing between two pieces."""

    max_bytes: int = MAX_HEAD_BYTES
    max_headers: int = MAX_HEAD_BYTES


def protocol_with_head_limits(
    head_s: float, *, reads_forwarded: bool = False, limits: HeadLimits | None = None
) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with limits on the duration (``head_s``) and size of a request's head.

    uvicorn waits indefinitely, with a file descriptor, and parses an incomplete line at quadratic cost.
    """
    chosen = {"head_s": head_s, "reads_forwarded": reads_forwarded, "limits": limits or HeadLimits()}
    return type("HeadLimitedProtocol", (_HeadLimitedProtocol,), chosen)


class _HeadLimitedProtocol(HttpToolsProtocol):
    head_s: ClassVar[float]
    reads_forwarded: ClassVar[bool] = False
    limits: ClassVar[HeadLimits] = HeadLimits()
    _head_timer: asyncio.TimerHandle | None = None
    _num_bytes = 0
    """Bytes received since the last complete head, piece of a body or message."""
    _is_in_head = True
    _made_progress = False
    """Whether the data being parsed has completed one of these, so that they are counted anew."""
    _is_refused = False

    def data_received(self, data: bytes) -> None:
        """Parse data in pieces within the limit, and refuse a head or a framing that exceeds it."""
        while data and not self._is_refused and not self.transport.is_closing():
            room = self.limits.max_bytes - self._num_bytes
            if room <= 0:
                self._refuse(_TOO_LARGE.format(self.limits.max_bytes))
                return
            piece, data = data[:room], data[room:]
            self._made_progress = False
            super().data_received(piece)
            self._num_bytes = 0 if self._made_progress else self._num_bytes + len(piece)
            protocol: Any = self.transport.get_protocol()
            if protocol is not self:  # the connection was upgraded to a WebSocket
                if data:
                    protocol.data_received(data)
                return

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        self._made_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._made_progress = self._is_in_head = True
        super().on_message_complete()

    def _refuse(self, message: str) -> None:
        """Reject a head; further data is discarded, so that the client reads the error."""
        self._is_refused = True
        cycle: Any = self.cycle
        if not self._is_in_head or (cycle is not None and not cycle.response_complete):
            self.transport.abort()  # trailing framing of a body, or a response is in progress
            return
        body = error_bytes(ApiError(ErrorCode.HEAD_TOO_LARGE, message))
        head = (
            f"HTTP/1.1 {ErrorCode.HEAD_TOO_LARGE.status} Request Header Fields Too Large\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def _should_upgrade(self) -> bool:
        return not self._is_refused and super()._should_upgrade()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        """Check the number of headers, and translate ``Forwarded``, before uvicorn handles the request."""
        if not self._is_refused and len(self.headers) > self.limits.max_headers:
            self._refuse(_TOO_MANY.format(self.limits.max_headers))
        if self._is_refused:
            return
        self._made_progress, self._is_in_head = True, False
        self._stop_head_timer()
        if self.reads_forwarded:
            self.headers[:] = as_x_forwarded(self.headers)
        super().on_headers_complete()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.head_s, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()

    def _on_head_timeout(self) -> None:
        """Close a connection whose head does not arrive; not while its previous response is sent."""
        transport: Any = self.transport
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            # This head is of the next request, and the current response is still in progress.
            self._start_head_timer()
        elif not transport.is_closing():
            transport.abort()
