"""The socket that the server listens on."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

from app.listen_socket import listening_socket


async def test_what_is_sent_leaves_at_once() -> None:
    """On asyncio's own loop too, which leaves sockets as they are that name no protocol."""
    sock = listening_socket(uvicorn.Config("none", port=0))
    accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda _, writer: accepted.put_nowait(writer.get_extra_info("socket")), sock=sock
    )
    async with server:
        _, writer = await asyncio.open_connection(*sock.getsockname())
        connection = await accepted.get()
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
