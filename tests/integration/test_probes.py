"""Health and metrics while the event loop stands still, of the real command's server as a process."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from tests.integration.test_signals import Process, started
from tests.waiting import wait_for_async

pytestmark = pytest.mark.timeout(120)
STALL_S: Final = 4.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Process]:
    async with started(tmp_path, STALL_S=str(STALL_S)) as process:
        await wait_for_async(process.ready)
        yield process


async def answer(process: Process, path: str, **headers: str) -> str:
    response = await process.client.get(path, headers=headers)
    assert response.status_code == 200
    return response.text


def value_of(text: str, name: str) -> float:
    found = re.search(rf"^{name}(?:_total)? (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def test_probes_are_answered_while_the_loop_stands_still(server: Process) -> None:
    before = await answer(server, "/metrics")
    assert value_of(before, "nnsight_engine_loop_stalls") == 0
    begin = time.monotonic()
    stalling = asyncio.create_task(server.client.get("/v1/models"))
    text = before
    while value_of(text, "nnsight_engine_loop_stalls") == 0:  # noticed while it lasts
        for path in ("/health/live", "/health/ready", "/metrics"):
            text = await answer(server, path)
        assert not stalling.done()
    assert value_of(text, "nnsight_engine_loop_stalls") == 1
    assert 1 <= value_of(text, "nnsight_engine_loop_stalled_seconds") <= time.monotonic() - begin + 1
    assert (await stalling).status_code == 200
    after = await answer(server, "/metrics")
    assert value_of(after, "nnsight_engine_loop_stalls") == 1
    assert value_of(after, "nnsight_engine_loop_stalled_seconds") >= STALL_S - 1


async def test_metrics_are_not_served_to_clients_the_loop_has_not_admitted(server: Process) -> None:
    await answer(server, "/metrics")
    begin = time.monotonic()
    stalling = asyncio.create_task(server.client.get("/v1/models"))
    await asyncio.sleep(0.5)
    await answer(server, "/metrics", authorization="Bearer another")
    assert time.monotonic() - begin >= STALL_S  # the loop's own answer, when it goes on
    await stalling


async def test_a_probe_s_connection_carries_every_other_request(server: Process) -> None:
    def ask() -> None:
        host = server.client.base_url
        connection = http.client.HTTPConnection(host.host, host.port, timeout=30)
        for path in ("/health/live", "/health/ready", "/metrics", "/v1/capabilities", "/health/live"):
            connection.request("GET", path)
            assert connection.getresponse().read()
        body = json.dumps({"prompt": "a" * 100_000, "stream": True, "max_tokens": 3})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.request("HEAD", "/health/live")
        assert connection.getresponse().status in {200, 405}
        connection.close()

    await asyncio.to_thread(ask)


async def test_a_connection_may_begin_slowly_or_say_nothing(server: Process) -> None:
    async def ask(pieces: list[bytes]) -> bytes:
        host = server.client.base_url
        reader, writer = await asyncio.open_connection(host.host, host.port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.1)
        line = await reader.readline()
        writer.close()
        return line

    head = b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    for pieces in ([head], [head[:2], head[2:]], [head[:12], head[12:]], [head[:40], head[40:]]):
        assert await ask(pieces) == b"HTTP/1.1 200 OK\r\n"
    reader, writer = await asyncio.open_connection(server.client.base_url.host, server.client.base_url.port)
    assert await server.ready()
    writer.write(head)
    assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    writer.close()
