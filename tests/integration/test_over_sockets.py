"""The same server behind a real HTTP server: what only sockets show."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import torch

from api_schemas.administration import Limits, NewKey
from app.auth.keys import Keys
from app.storage.database import Database
from app.storage.keys import KeyStore
from tests.fakes.engine import FakeBehaviour, FakeEngineClient
from tests.integration.scripted_traces import HEADERS, message
from tests.integration.serving import Application
from tests.waiting import wait_for_async


@contextlib.asynccontextmanager
async def listening(
    folder: Path, behaviour: FakeBehaviour | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngineClient]]:
    served = Application(folder, behaviour, **settings)
    async with served.listening() as client:
        yield client, served.engine


async def until_idle(engine: FakeEngineClient) -> None:
    await wait_for_async(lambda: not engine.num_running and not engine.fake_traces.num_running)


COMPLETION: Final = "/v1/completions", {"json": {"prompt": "a", "max_tokens": 2000}}
STREAM: Final = "/v1/completions", {"json": {"prompt": "a", "max_tokens": 2000, "stream": True}}
TRACE: Final = "/v1/traces", {"content": message(), "headers": HEADERS}


@pytest.mark.parametrize(
    ("sent_request", "delay_s", "trace_is", "seen"),
    [
        (COMPLETION, 30, {}, None),
        (STREAM, 30, {}, None),
        (STREAM, 0.01, {}, b"data: "),
        (TRACE, 0, {"delay_s": 30}, None),
        (TRACE, 0, {"hangs": True}, b"RUNNING"),
        (TRACE, 0, {"saves": {"x": torch.zeros(2**24)}}, b"COMPLETED"),
    ],
    ids=["answer", "stream", "in a stream", "trace", "in a trace", "in a result"],
)
async def test_a_client_that_leaves_ends_the_engines_work(
    tmp_path: Path,
    sent_request: tuple[str, dict[str, Any]],
    delay_s: float,
    trace_is: dict[str, Any],
    seen: bytes | None,
) -> None:
    """It leaves as soon as the engine works, or when it has seen something."""
    path, sent = sent_request
    async with listening(tmp_path, FakeBehaviour(delay_s=delay_s)) as (client, engine):
        for name, value in trace_is.items():
            setattr(engine.fake_traces.behaviour, name, value)
        if seen is None:
            asked = asyncio.create_task(client.post(path, **sent))
            await wait_for_async(lambda: engine.num_running or engine.fake_traces.num_running)
            asked.cancel()
        else:
            async with client.stream("POST", path, **sent) as response:
                async for chunk in response.aiter_raw():
                    if seen in chunk:
                        break
        await until_idle(engine)
        assert engine.num_calls + len(engine.fake_traces.heads) == 1


async def test_a_body_over_the_limit_is_answered_and_the_connection_lives_on(tmp_path: Path):
    async with listening(tmp_path, max_body_bytes=10_000) as (client, engine):

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(300):
                yield b" " * 10_000

        for content in (b" " * 3_000_000, chunks()):
            response = await client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert engine.num_calls == 1


async def test_a_client_that_vanishes_while_it_sends_gives_its_place_back(tmp_path: Path):
    database = Database(tmp_path / "data")
    await database.start()
    new = NewKey(tenant="acme", limits=Limits(concurrency=1))
    key = (await Keys(KeyStore(database)).create(new)).key
    await database.close()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: 100\r\n\r\n{{"
    )
    served = listening(tmp_path, upload_idle_timeout_s=3)
    async with served as (client, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(head.encode())
        client.headers["authorization"] = f"Bearer {key}"

        async def is_in_flight() -> bool:
            return bool((await client.get("/v1/status")).json()["in_flight"])

        # Whoever asks for a completion meanwhile may have the place when this one comes.
        await wait_for_async(is_in_flight)
        async with asyncio.timeout(60):
            refused = await client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 429
            answer = await reader.read()  # up to the end of the connection
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"upload_timed_out" in answer
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        writer.close()


async def test_a_client_that_reads_nothing_of_its_stream_is_cut_off(tmp_path: Path):
    """Its request ends, and its connection, with what it has not taken, goes too."""
    request = {"prompt": "w" * 20_000, "stream": True, "max_tokens": 2000, "n": 8}
    before = len(os.listdir("/proc/self/fd"))
    async with listening(tmp_path, client_stall_timeout_s=1) as (client, engine):
        await client.get("/health/live")
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port, limit=1024)
        writer.write(post_of(json.dumps(request)))
        await wait_for_async(lambda: engine.num_running)
        async with asyncio.timeout(60):
            await until_idle(engine)
            # Nothing more comes than what was on its way.
            got = b""
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(2**20):
                    got += piece
        assert b"data: " in got
        assert b"[DONE]" not in got
        writer.close()
        # One that reads, however slowly, gets all of it.
        few = {"prompt": "a", "stream": True, "max_tokens": 80}
        engine.behaviour.delay_s = 0.02
        async with client.stream("POST", "/v1/completions", json=few) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert len(lines) == 81
    await wait_for_async(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


async def test_a_connection_without_a_request_is_not_kept(tmp_path: Path):
    async with listening(tmp_path, upload_idle_timeout_s=0.5) as (client, _):
        port = client.base_url.port
        silent = await asyncio.open_connection("127.0.0.1", port)
        half = await asyncio.open_connection("127.0.0.1", port)
        half[1].write(b"POST /v1/completions HTTP/1.1\r\nHost: local")
        again = await asyncio.open_connection("127.0.0.1", port)
        again[1].write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await again[0].readuntil(b"}")).startswith(b"HTTP/1.1 200")
        again[1].write(b"GET /health/live HTTP/1.1\r\n")  # and no more of it
        for reader, writer in (silent, half, again):
            with pytest.raises(ConnectionError):
                assert not await asyncio.wait_for(reader.read(), 50)
                raise ConnectionError("at its end")
            writer.close()
        # Whoever works on, is not hurried.
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        await asyncio.sleep(1)
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_half_a_head_behind_a_stream_does_not_end_it(tmp_path: Path):
    served = listening(tmp_path, FakeBehaviour(delay_s=0.1), upload_idle_timeout_s=0.3)
    async with served as (client, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(post_of(json.dumps({"prompt": "a", "stream": True, "max_tokens": 12})))
        await reader.readuntil(b"data: ")
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: local")
        assert b"data: [DONE]" in await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 50)
        # Then it is waited for no longer than any other.
        with pytest.raises(ConnectionError):
            assert not await asyncio.wait_for(reader.read(), 50)
            raise ConnectionError("at its end")
        writer.close()


async def test_a_body_that_comes_byte_by_byte_is_not_waited_for_for_ever(tmp_path: Path):
    served = listening(tmp_path, upload_idle_timeout_s=1, request_timeout_s=1.5)
    async with served as (client, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        whole = post_of(json.dumps({"prompt": "a" * 5000}))
        writer.write(whole[:200])
        sending = asyncio.create_task(trickle(writer, whole[200:]))
        answer = await asyncio.wait_for(reader.read(), 50)
        assert answer.startswith(b"HTTP/1.1 504")
        assert b"request_timed_out" in answer
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


def post_of(body: str) -> bytes:
    """Return a completion request as bytes."""
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a byte now and then."""
    for byte in data:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.1)
