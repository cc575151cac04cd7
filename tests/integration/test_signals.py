"""SIGTERM, once and twice, and an engine that dies too often: the server's process, seen from outside."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Final

import pytest

from tests.integration.command_server import started
from tests.waiting import wait_for_async

pytestmark = pytest.mark.timeout(180)
LONG: Final = {"prompt": "a", "stream": True, "max_tokens": 40}  # two seconds
ENDLESS: Final = {"prompt": "a", "stream": True, "max_tokens": 2000}


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
