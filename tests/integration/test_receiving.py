"""What clients send and the server holds: bounded over all requests and sockets, and given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from nnsight_engine.remote_backend.frames import Frame, FrameKind, FrameReader, called, calling, head_of
from tests.integration.conftest import ErrorCheck
from tests.integration.scripted_traces import HEADERS, trace
from tests.integration.test_job_events import Live, live
from tests.waiting import wait_for_async

pytestmark = pytest.mark.timeout(60)


async def test_bodies_that_are_held_are_bounded_and_given_back(tmp_path: Path, error_of: ErrorCheck) -> None:
    async with live(tmp_path, max_received_bytes=100_000) as server:

        async def post(script: str) -> Any:
            content = trace(script, payload=bytes(60_000))
            return await server.client.post("/v1/traces", content=content, headers=HEADERS)

        running = asyncio.create_task(post("hang"))
        await wait_for_async(lambda: server.engine.num_running == 1)
        refused = await post("ok")
        assert "may have 100000 bytes of requests" in error_of(refused, 429, "rate_limit_exceeded")
        assert refused.headers["retry-after"]
        server.engine.released.set()
        assert (await running).status_code == 200
        assert (await post("ok")).status_code == 200
        await wait_for_async(lambda: server.context.receiving.num_bytes == 0)


async def test_a_body_that_breaks_off_is_given_back(tmp_path: Path) -> None:
    async with live(tmp_path) as server:
        whole = trace(payload=bytes(300_000))

        async def half() -> AsyncIterator[bytes]:
            yield whole[:200_000]
            await wait_for_async(lambda: server.context.receiving.num_bytes == 200_000)
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await server.client.post("/v1/traces", content=half(), headers=HEADERS)
        await wait_for_async(lambda: server.context.receiving.num_bytes == 0)


async def test_a_paused_upload_is_refused_at_once_when_the_server_ends(tmp_path: Path) -> None:
    async with live(tmp_path) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.client.base_url.port)
        head = f"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: {HEADERS['content-type']}\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\nhalf".encode())
        await wait_for_async(lambda: server.context.receiving.num_bytes > 0)
        draining = asyncio.create_task(server.context.lifecycle.drain(0.1))
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)  # and not after upload_idle_timeout_s
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"draining"' in answer
        await asyncio.wait_for(draining, 20)
        writer.close()


async def call_of(socket: ClientConnection) -> tuple[int, bytes]:
    """Return the call that a socket brings next."""
    reader = FrameReader(2**20)
    while True:
        message = await socket.recv()
        if isinstance(message, bytes):
            for frame in reader.feed(message):
                number, data = called(frame)
                return number, bytes(data)


async def send(socket: ClientConnection, frame: Frame) -> None:
    for piece in frame.pieces():
        await socket.send(piece)


async def pong(socket: ClientConnection) -> None:
    """Wait until the server has read what was sent."""
    await socket.send('{"type": "ping"}')
    while "pong" not in str(await socket.recv()):
        pass


def asking(server: Live, job_id: str) -> asyncio.Task[Any]:
    return asyncio.create_task(server.context.jobs.local_calls.call(job_id, b"what?"))


async def test_unawaited_answers_are_not_held(tmp_path: Path) -> None:
    async with live(tmp_path) as server:
        held = server.context.receiving
        job_id = await server.submit("hang")
        async with server.socket(job_id, local=True) as socket, server.socket(job_id, local=True) as other:
            # As large as they may be, of a call that is not there, and then whole ones.
            await other.send(head_of(FrameKind.LOCAL, 2**30))
            for _ in range(8):
                await other.send(bytes(2**20))
            await pong(other)
            assert held.num_bytes == 0
            await send(socket, calling(99, bytes(3 * 2**20)))
            await send(socket, calling(99, b""))
            call = asking(server, job_id)
            number, question = await call_of(socket)
            assert question == b"what?"
            # One half of an answer, which ends with its call; then a whole one to the next call.
            late = list(calling(number, bytes(4 * 2**20)).pieces())
            for piece in late[:3]:
                await socket.send(piece)
            await pong(socket)
            assert held.num_bytes == 2 * 2**20 - 8
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            for piece in late[3:]:
                await socket.send(piece)
            await pong(socket)
            assert held.num_bytes == 0
            call = asking(server, job_id)
            number, _ = await call_of(socket)
            await send(socket, calling(number, b"that" * 2**19))
            assert bytes(await call) == b"that" * 2**19
            assert held.num_bytes == 0
            # Who leaves in the middle leaves nothing.
            call = asking(server, job_id)
            number, _ = await call_of(socket)
            await socket.send(b"".join(calling(number, bytes(2**20)).pieces())[:-1])
            await pong(socket)
            assert held.num_bytes == 2**20 - 1
        await wait_for_async(lambda: held.num_bytes == 0)
        call.cancel()
        server.engine.released.set()


async def test_answers_count_with_bodies_and_no_frame_of_another_kind_is_read(tmp_path: Path) -> None:
    async with live(tmp_path, max_received_bytes=2**20) as server:
        job_id = await server.submit("hang")
        call = asking(server, job_id)
        for frame, code in (
            (lambda number: calling(number, bytes(3 * 2**19)), 1013),
            (lambda _: Frame(FrameKind.EVENT, bytes(20)), 1003),
            (lambda _: Frame(FrameKind.LOCAL, bytes(4)), 1003),
        ):
            async with server.socket(job_id, local=True) as socket:
                number, _ = await call_of(socket)
                with pytest.raises(ConnectionClosed):
                    await send(socket, frame(number))
                    while True:
                        await socket.recv()
                assert socket.close_code == code
            await wait_for_async(lambda: server.context.receiving.num_bytes == 0)
        call.cancel()
        server.engine.released.set()
