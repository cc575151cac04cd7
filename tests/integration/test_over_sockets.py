"""The same server behind a real HTTP server: what only sockets show."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn

from api_schemas.keys import Limits, NewKey
from app.auth.keys import Keys
from app.engine.fake import FakeBehaviour, FakeEngineClient
from app.main import create_app, new_store
from app.settings import Settings
from app.storage.database import Database
from app.storage.keys import KeyStore
from tests.integration.trace_messages import HEADERS, message


@contextlib.asynccontextmanager
async def listening(
    directory: Path, behaviour: FakeBehaviour, **settings: float | Path
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngineClient]]:
    chosen = Settings.model_validate({"result_dir": directory, "drain_timeout_s": 1, **settings})
    store = new_store(chosen)
    engine = FakeEngineClient(chosen, store, behaviour)
    config = uvicorn.Config(create_app(chosen, engine, store), port=0, log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(10):
        while not server.started:  # noqa: ASYNC110 - uvicorn has a flag and no event
            await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        yield client, engine
    server.should_exit = True
    await serving


async def until_idle(engine: FakeEngineClient) -> None:
    async with asyncio.timeout(5):
        # The engine tells nobody when it is idle.
        while engine.num_running or engine.fake_traces.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_gives_up_ends_the_engines_work(tmp_path: Path, is_stream: bool):
    async with listening(tmp_path, FakeBehaviour(delay_s=30)) as (client, engine):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json={"prompt": "a", "stream": is_stream}, timeout=0.2)
        await until_idle(engine)
        assert engine.num_calls == 1


async def test_a_client_that_stops_reading_a_stream_ends_it(tmp_path: Path):
    request = {"prompt": "a", "stream": True, "max_tokens": 2000}
    async with listening(tmp_path, FakeBehaviour(delay_s=0.01)) as (client, engine):
        async with client.stream("POST", "/v1/completions", json=request) as response:
            async for line in response.aiter_lines():
                assert line.startswith("data: ")
                break
            assert engine.num_running == 1
        await until_idle(engine)


async def test_a_client_that_gives_up_on_a_trace_ends_it(tmp_path: Path):
    async with listening(tmp_path, FakeBehaviour()) as (client, engine):
        engine.fake_traces.behaviour.delay_s = 30
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/traces", content=message(), headers=HEADERS, timeout=0.2)
        await until_idle(engine)
        assert len(engine.fake_traces.heads) == 1


async def test_a_client_that_leaves_a_running_trace_ends_it(tmp_path: Path):
    async with listening(tmp_path, FakeBehaviour()) as (client, engine):
        engine.fake_traces.behaviour.hangs = True
        async with client.stream("POST", "/v1/traces", content=message(), headers=HEADERS) as response:
            async for chunk in response.aiter_raw():
                if b"RUNNING" in chunk:
                    break
            assert engine.fake_traces.num_running == 1
        await until_idle(engine)


async def test_a_client_that_leaves_while_it_sends_a_trace_leaves_nothing(tmp_path: Path):
    async def half() -> AsyncIterator[bytes]:
        yield message()[:20]
        raise ConnectionError("the laptop was closed")

    async with listening(tmp_path, FakeBehaviour()) as (client, engine):
        with pytest.raises(ConnectionError):
            await client.post("/v1/traces", content=half(), headers=HEADERS)
        response = await client.post("/v1/traces", content=message(), headers=HEADERS)
        assert response.status_code == 200
        assert len(engine.fake_traces.heads) == 1


async def test_a_client_that_leaves_a_large_result_ends_it(tmp_path: Path):
    async with listening(tmp_path, FakeBehaviour()) as (client, engine):
        engine.fake_traces.behaviour.saves = {"x": torch.zeros(2**24)}
        async with client.stream("POST", "/v1/traces", content=message(), headers=HEADERS) as response:
            async for chunk in response.aiter_raw():
                if b"COMPLETED" in chunk:
                    break
        await until_idle(engine)


async def test_events_arrive_as_they_are_made(tmp_path: Path):
    request = {"prompt": "a b", "stream": True, "max_tokens": 4}
    async with listening(tmp_path, FakeBehaviour(delay_s=0.1)) as (client, _):
        loop = asyncio.get_running_loop()
        async with client.stream("POST", "/v1/completions", json=request) as response:
            arrivals = [loop.time() async for line in response.aiter_lines() if line]
        assert len(arrivals) == 5
        assert arrivals[3] - arrivals[0] > 0.2


async def test_a_body_over_the_limit_is_answered_and_the_connection_lives_on(tmp_path: Path):
    async with listening(tmp_path, FakeBehaviour(), max_body_bytes=10_000) as (client, engine):

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
    folder = tmp_path / "data"
    database = Database(folder)
    await database.start()
    new = NewKey(tenant="acme", limits=Limits(concurrency=1))
    key = (await Keys(KeyStore(database)).create(new)).key
    await database.close()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: 100\r\n\r\n{{"
    )
    served = listening(tmp_path, FakeBehaviour(), data_dir=folder, upload_idle_timeout_s=3)
    async with served as (client, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(head.encode())
        client.headers["authorization"] = f"Bearer {key}"
        async with asyncio.timeout(10):
            # The server tells nobody that it has begun to read.
            while (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            answer = await reader.read()  # up to the end of the connection
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"upload_timed_out" in answer
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        writer.close()
