"""The real command's server as a process: signals, probes while its event loop stands still, its end."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx
import pytest
import pytest_asyncio

from tests.integration.command_server import Process, started
from tests.waiting import wait_for_async

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]
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
        assert server.process.stderr is not None
        said = (await server.process.stderr.read()).decode()
        assert "shutting down: waiting up to 150 s for 1 request; a second signal ends this sooner" in said
        assert "ending requests and engine; a third signal ends the process at once" in said


async def test_a_server_whose_engine_dies_too_often_ends_and_says_so(tmp_path: Path) -> None:
    environment = {
        "DIES_AFTER_S": "0.3",
        "NNSIGHT_ENGINE_MAX_ENGINE_RESTARTS": "2",
    }
    async with started(tmp_path, **environment) as server:
        await wait_for_async(server.ready)
        assert await server.ended() == 1
        assert server.process.stderr is not None
        lines = (await server.process.stderr.read()).decode().splitlines()
        assert lines[-1] == "the engine has failed more than 2 times; not restarting it again"
        assert lines.count(lines[-1]) == 1


async def _has(lines: list[str], number: int) -> bool:
    return len(lines) >= number


STALLS: Final = "nnsight_engine_loop_stalls"
STALLED_S: Final = "nnsight_engine_loop_stalled_seconds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture
def released(folder: Path) -> Path:
    """The file that ends a stall."""
    file = folder / "released"
    file.unlink(missing_ok=True)
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path) -> AsyncIterator[Process]:
    async with started(folder, STALLS_UNTIL=str(folder / "released")) as process:
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


async def noticed_stall(process: Process) -> asyncio.Task[httpx.Response]:
    """Stop the event loop, and return the request that does so once that has been noticed."""
    before = value_of(await answer(process, "/metrics"), STALLS)
    stalling = asyncio.create_task(process.client.get("/v1/models"))

    async def is_noticed() -> bool:
        return value_of(await answer(process, "/metrics"), STALLS) == before + 1

    await wait_for_async(is_noticed)
    return stalling


async def test_probes_are_answered_while_the_loop_stands_still(server: Process, released: Path) -> None:
    before = value_of(await answer(server, "/metrics"), STALLS)
    stalling = await noticed_stall(server)
    for path in ("/health/live", "/health/ready"):
        await answer(server, path)
    first, second = [value_of(await answer(server, "/metrics"), STALLED_S) for _ in range(2)]
    assert 1 <= first < second
    assert not stalling.done()
    await asyncio.to_thread(released.touch)
    assert (await stalling).status_code == 200
    after = await answer(server, "/metrics")
    assert value_of(after, STALLS) == before + 1
    assert value_of(after, STALLED_S) >= second


async def test_metrics_are_not_served_to_clients_the_loop_has_not_admitted(
    server: Process, released: Path
) -> None:
    await answer(server, "/metrics")
    stalling = await noticed_stall(server)
    other = asyncio.create_task(answer(server, "/metrics", authorization="Bearer another"))
    for _ in range(20):
        await answer(server, "/metrics")
    assert not other.done()
    await asyncio.to_thread(released.touch)
    await asyncio.gather(stalling, other)


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
