"""The socket that the server listens on, and how long it waits for a client's head of a request."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MS: Final = 1000
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds until a silent connection is asked whether its client is there, between questions; their number."""


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
    # A client whose machine or network is gone says nothing, and would be waited for.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_KEEP_ALIVE, "TCP_USER_TIMEOUT": round(stall_s * _MS)}.items():
        if hasattr(socket, name):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def patient_for(head_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP that waits so long for a request's head once a connection, or a head, has begun.

    uvicorn itself waits for ever, and each connection that never says anything keeps a descriptor.
    """

    class PatientProtocol(HttpToolsProtocol):
        _waiting: asyncio.TimerHandle | None = None

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
            self._wait_no_more()
            super().on_headers_complete()

        def _wait(self) -> None:
            self._wait_no_more()
            self._waiting = self.loop.call_later(head_s, self._give_up)

        def _wait_no_more(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()

        def _give_up(self) -> None:
            transport: Any = self.transport
            if not transport.is_closing():
                transport.abort()

    return PatientProtocol
