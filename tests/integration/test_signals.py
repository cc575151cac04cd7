"""SIGTERM, once and twice, and an engine that dies too often: the server's process, seen from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.waiting import wait_for_async

pytestmark = pytest.mark.timeout(180)
PROJECT: Final = Path(__file__).resolve().parents[2]
LONG: Final = {"prompt": "a", "stream": True, "max_tokens": 40}  # two seconds
ENDLESS: Final = {"prompt": "a", "stream": True, "max_tokens": 2000}


class Process:
    """A server's process, and a client of it that uses each connection once, as those who come late do."""

    def __init__(self, process: asyncio.subprocess.Process, client: httpx.AsyncClient) -> None:
        self.process = process
        self.client = client
        self.lines: list[str] = []

    async def stream(self, body: dict[str, Any]) -> list[str]:
        """Return the lines of a stream, which are in ``lines`` as they come."""
        self.lines = []
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                self.lines += [line] if line else []
        return self.lines

    async def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self.client.get("/health/ready")).status_code == 200
        return False

    async def draining(self) -> bool:
        return bool((await self.client.get("/health/live")).json() == {"status": "draining"})

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 45)


@contextlib.asynccontextmanager
async def started(folder: Path, **environment: str) -> AsyncIterator[Process]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "NNSIGHT_ENGINE_DATA_DIR": str(folder / "data"),
        "NNSIGHT_ENGINE_RESULT_DIR": str(folder / "results"),
        **environment,
    }
    process = await asyncio.create_subprocess_exec(
        *("env", *(f"{name}={value}" for name, value in settings.items())),
        sys.executable, "-m", "tests.integration.signals_server", str(port),
        cwd=PROJECT, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    limits = httpx.Limits(max_keepalive_connections=0)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=20, limits=limits
        ) as client:
            yield Process(process, client)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_stopping_server_finishes_running_requests(tmp_path: Path) -> None:
    async with started(tmp_path) as server:
        await wait_for_async(server.ready)
        running = asyncio.create_task(server.stream(LONG))
        await wait_for_async(lambda: _has(server.lines, 2))
        server.process.send_signal(signal.SIGTERM)
        await wait_for_async(server.draining)
        # It still answers whoever comes, and says why it does nothing for them.
        refused = await server.client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert (await server.client.get("/health/ready")).status_code == 503
        lines = await running
        assert lines[-1] == "data: [DONE]"
        assert len(lines) == 41
        assert await server.ended() == -signal.SIGTERM


async def test_what_the_drain_does_not_wait_for_ends_with_an_error(tmp_path: Path) -> None:
    async with started(tmp_path, NNSIGHT_ENGINE_DRAIN_TIMEOUT_S="0.5") as server:
        await wait_for_async(server.ready)
        running = asyncio.create_task(server.stream(ENDLESS))
        await wait_for_async(lambda: _has(server.lines, 2))
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended() == -signal.SIGTERM
        *_, failure, done = await running
        assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_wait(tmp_path: Path, kind: signal.Signals) -> None:
    async with started(tmp_path, NNSIGHT_ENGINE_DRAIN_TIMEOUT_S="150") as server:
        await wait_for_async(server.ready)
        running = asyncio.create_task(server.stream(ENDLESS))
        await wait_for_async(lambda: _has(server.lines, 2))
        server.process.send_signal(kind)
        await wait_for_async(server.draining)
        assert server.process.returncode is None
        server.process.send_signal(kind)
        assert await server.ended() != 0
        assert "draining" in (await running)[-2]


async def test_a_server_whose_engine_dies_too_often_ends_and_says_so(tmp_path: Path) -> None:
    environment = {
        "DIES_AFTER_S": "0.3",
        "NNSIGHT_ENGINE_MAX_ENGINE_RESTARTS": "2",
        "NNSIGHT_ENGINE_ENGINE_RESTART_DELAY_S": "0.1",
    }
    async with started(tmp_path, **environment) as server:
        await wait_for_async(server.ready)
        assert await server.ended() == 1
        assert server.process.stderr is not None
        assert b"failed too often" in await server.process.stderr.read()


async def _has(lines: list[str], number: int) -> bool:
    return len(lines) >= number
