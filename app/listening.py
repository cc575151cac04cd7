"""The socket that the server listens on."""

from __future__ import annotations

import socket

import uvicorn


def listening_socket(config: uvicorn.Config) -> socket.socket:
    """Bind the address of ``config``; what is sent over its connections leaves at once.

    uvicorn's own socket names no protocol, so that asyncio does not see TCP in it and leaves Nagle's
    algorithm on: small pieces of a stream then wait for the client's delayed acknowledgement, 40 ms on Linux.
    """
    sock = config.bind_socket()
    # Connections inherit it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
