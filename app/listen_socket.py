"""The socket that the server listens on, and how long it waits for a client's head of a request."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar, Final, Protocol

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api_schemas.errors import STATUS, ApiError, ErrorCode
from app.errors import error_bytes
from app.forwarded import as_x_forwarded

MAX_HEAD_BYTES: Final = 64 * 1024
"""Of a request's line and headers, and of what a body has beside its content."""
_LINGER_S: Final = 2.0
"""How long a client whose head was refused has to read that."""
_TOO_LARGE: Final = (
    f"A request's line and headers may have {MAX_HEAD_BYTES} bytes together, and this one's have more; send "
    "what is long in the body."
)
_MS: Final = 1000
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds until a silent connection is asked whether its client is there, between questions; their number."""


class Settable(Protocol):
    """A socket, or what asyncio gives out in place of one."""

    def setsockopt(self, level: int, name: int, value: int, /) -> None:
        """Set an option."""


def listening_socket(config: uvicorn.Config, *, stall_s: float = 60.0) -> socket.socket:
    """Bind the address of ``config``; what is sent over its connections leaves at once.

    uvicorn's own socket names no protocol, so that asyncio does not see TCP in it and leaves Nagle's
    algorithm on: small pieces of a stream then wait for the client's delayed acknowledgement, 40 ms on Linux.

    Args:
        config: uvicorn's.
        stall_s: How long a client may take nothing of what was sent before its connection is cut; what it has
            not taken would stay in memory with it, also after the request's end.
    """
    sock = config.bind_socket()
    # Connections inherit all of it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    notice_loss(sock, stall_s=stall_s)
    return sock


def notice_loss(sock: Settable, *, stall_s: float = 60.0) -> None:
    """Have the system end connections whose other side's machine or network is gone, and so says nothing.

    Args:
        sock: A connection, or a listening socket, from which connections inherit it.
        stall_s: As of ``listening_socket``.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_KEEP_ALIVE, "TCP_USER_TIMEOUT": round(stall_s * _MS)}.items():
        if hasattr(socket, name):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def patient_for(head_s: float, *, reads_forwarded: bool = False) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP that waits only so long for a request's head, and takes none of any length.

    uvicorn itself waits for ever, and each connection that never says anything keeps a descriptor. It also
    looks at what it has of a line again with each piece that comes.

    Args:
        head_s: How long.
        reads_forwarded: Whether proxies tell of their clients in ``Forwarded``.
    """
    return type("PatientProtocol", (_Patient,), {"head_s": head_s, "reads_forwarded": reads_forwarded})


class _Patient(HttpToolsProtocol):
    """uvicorn's, whose patience for a head ends.

    Attributes:
        head_s: How long it lasts.
        reads_forwarded: As of ``patient_for``.
    """

    head_s: ClassVar[float]
    reads_forwarded: ClassVar[bool] = False
    _waiting: asyncio.TimerHandle | None = None
    _num_bytes = 0
    """What came since a head, a piece of a body or a message was whole."""
    _is_in_head = True
    _got_on = False
    _is_refused = False

    def data_received(self, data: bytes) -> None:
        """Take what came, in pieces that are counted."""
        while data and not self._is_refused and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._num_bytes
            if room <= 0:
                self._refuse()
                return
            piece, data = data[:room], data[room:]
            self._got_on = False
            super().data_received(piece)
            self._num_bytes = 0 if self._got_on else self._num_bytes + len(piece)
            protocol: Any = self.transport.get_protocol()
            if protocol is not self:  # but a WebSocket's
                if data:
                    protocol.data_received(data)
                return

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_on = self._is_in_head = True
        super().on_message_complete()

    def _refuse(self) -> None:
        """Say that a head is too long; what still comes is dropped, so that its client comes to reading."""
        self._is_refused = True
        cycle: Any = self.cycle
        if not self._is_in_head or (cycle is not None and not cycle.response_complete):
            self.transport.abort()  # it is the end of a body, or an answer is on its way
            return
        body = error_bytes(ApiError(ErrorCode.HEAD_TOO_LARGE, _TOO_LARGE))
        head = (
            f"HTTP/1.1 {STATUS[ErrorCode.HEAD_TOO_LARGE]} Request Header Fields Too Large\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        self._got_on, self._is_in_head = True, False
        self._wait_no_more()
        if self.reads_forwarded:
            self.headers[:] = as_x_forwarded(self.headers)
        super().on_headers_complete()

    def _wait(self) -> None:
        self._wait_no_more()
        self._waiting = self.loop.call_later(self.head_s, self._give_up)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _give_up(self) -> None:
        transport: Any = self.transport
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._wait()  # the head is of the next request, and this one's answer is on its way
        elif not transport.is_closing():
            transport.abort()
