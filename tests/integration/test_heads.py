"""Heads of requests have a length, counted while they come; on the real command's server as a process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Final

import pytest
import pytest_asyncio

from app.server.sockets import MAX_HEAD_BYTES
from tests.integration.command_server import Process, started
from tests.liveness import Bystanders
from tests.waiting import wait_for_async

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]
PIECE: Final = b"a" * 2**20
LINE: Final = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Process]:
    async with started(tmp_path_factory.mktemp("server")) as process:
        await wait_for_async(process.ready)
        yield process


@contextlib.contextmanager
def connected(server: Process) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.client.base_url.port or 0), timeout=20) as sock:
        yield sock


def answered(sock: socket.socket) -> bytes:
    """Return all that the server says until it closes the connection."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(2**16):
            said += piece
    return said


def status_of(sock: socket.socket) -> int:
    """Return an answer's status, once all of it has come."""
    response = http.client.HTTPResponse(sock)
    response.begin()
    response.read()
    return response.status


def head_of(num_bytes: int, *, path: str = "/v1/status") -> bytes:
    begin = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-filling: ".encode()
    end = b"\r\nconnection: close\r\n\r\n"
    return begin + b"a" * (num_bytes - len(begin) - len(end)) + end


async def test_endless_request_heads_time_out(server: Process) -> None:
    bystanders = Bystanders(server.client.base_url.port or 0)
    endless = [
        LINE + b"x: ",
        LINE + b"",
        b"GET /",
        LINE + b"content-length: 1\r\n\r\na" + LINE + b"x: ",
        LINE + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
        LINE + b"transfer-encoding: chunked\r\n\r\n1;",
        b"GET /health/live HTTP/1.1\r\nx: ",
    ]

    def send(begin: bytes, _: int) -> None:
        with connected(server) as sock, contextlib.suppress(OSError):
            sock.sendall(begin)
            for _ in range(125):
                sock.sendall(PIECE)

    await asyncio.to_thread(bystanders.unharmed, *(functools.partial(send, begin) for begin in endless))
    assert await server.ready()


@pytest.mark.parametrize("path", ["/v1/status", "/health/live"])
async def test_a_head_has_sixty_four_kibibytes(server: Process, path: str) -> None:
    def ask(num_bytes: int) -> bytes:
        with connected(server) as sock:
            sock.sendall(head_of(num_bytes, path=path))
            return answered(sock)

    assert (await asyncio.to_thread(ask, MAX_HEAD_BYTES)).startswith(b"HTTP/1.1 200 ")
    head, _, body = (await asyncio.to_thread(ask, MAX_HEAD_BYTES + 1)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "head_too_large"


async def test_a_head_is_refused_before_it_is_whole_and_in_many_pieces(server: Process) -> None:
    def ask() -> bytes:
        with connected(server) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(LINE)
            for number in range(4000):
                sock.sendall(f"x-{number}: {'a' * 20}\r\n".encode())
            return answered(sock)
        return b""

    assert (await asyncio.to_thread(ask)).startswith(b"HTTP/1.1 431 ")


async def test_each_request_of_a_connection_has_a_head_of_its_own(server: Process) -> None:
    def ask() -> bytes:
        keeps = head_of(40_000).replace(b"connection: close", b"connection: keep-alive")
        with connected(server) as sock:
            for _ in range(3):
                sock.sendall(keeps)
                assert status_of(sock) == 200
            body = json.dumps({"prompt": "a" * 1_000_000, "max_tokens": 1}).encode()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(LINE + head.encode() + body)
            assert status_of(sock) in {200, 400}
            sock.sendall(head_of(MAX_HEAD_BYTES + 10_000))
            return answered(sock)

    assert (await asyncio.to_thread(ask)).startswith(b"HTTP/1.1 431 ")
