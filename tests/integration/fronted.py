"""Replicas with the fake engine on real sockets behind a front, for tests of what goes where."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection

from app.replicas.front import create_front
from app.replicas.options import ModelOptions, ReplicaOptions
from app.replicas.protocol import ReplicaAddress, Replicas, none_ready
from app.replicas.relay import REPLICA_HEADER
from app.replicas.routing import ranked
from app.settings import Settings
from tests.fakes.results import MODEL
from tests.integration.scripted_traces import ScriptedEngine
from tests.integration.serving import Application, listening, port_of
from tests.waiting import wait_for_async


class Replica(Application):
    """A server with the fake engine, which a test may kill."""

    def __init__(self, name: str, directory: Path, **settings: Any) -> None:
        chosen = {"replica": name, "drain_timeout_s": 0.2, "inline_tensor_bytes": 0, **settings}
        super().__init__(directory, traces={"vllm": ScriptedEngine()}, **chosen)
        self.name = name
        self.address = ReplicaAddress(name, "http://127.0.0.1:9")
        self.connections: Any = None

    def kill(self) -> None:
        """Cut all connections and take no more, as when a process is killed."""
        self.connections.servers[0].close()
        for one in list(self.connections.server_state.connections):
            one.transport.abort()


class Some(Replicas):
    """Replicas as the front sees them; counts what is under way."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.all = {one.name: one for one in replicas}
        self.loads: collections.Counter[str] = collections.Counter(dict.fromkeys(self.all, 0))

    @contextlib.asynccontextmanager
    async def acquire(
        self, key: bytes = b"", *, tried: Collection[str] = ()
    ) -> AsyncGenerator[ReplicaAddress, None]:
        order = ranked({name: self.loads[name] for name in self.all}, key, tried=tried)
        if not order:
            raise none_ready()
        self.loads[order[0]] += 1
        try:
            yield self.all[order[0]].address
        finally:
            self.loads[order[0]] -= 1

    async def addresses(self) -> list[ReplicaAddress]:
        return [one.address for one in self.all.values()]


class Started:
    """The test has started the replicas."""

    ready = True
    alive = True

    async def start(self) -> None: ...

    async def died(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None: ...


class Below:
    """An application below a path, as Ray Serve has one whose ``route_prefix`` is not the root."""

    def __init__(self, app: Starlette, prefix: str) -> None:
        self.app = app
        self.state = app.state
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, "root_path": self.prefix}, receive, send)


class Fronted:
    """A front, its replicas, and a client."""

    def __init__(self, server: Any, client: httpx.AsyncClient, models: list[Some]) -> None:
        self.server = server
        self.client = client
        self.models = models

    @property
    def some(self) -> Some:
        return self.models[0]

    @property
    def replicas(self) -> Iterator[Replica]:
        return (one for some in self.models for one in some.all.values())

    async def complete(self, prompt: str = "a b", **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **body})

    async def until_idle(self) -> None:
        await wait_for_async(lambda: not any(one.engine.num_running for one in self.replicas))
        await wait_for_async(lambda: not any(count for some in self.models for count in some.loads.values()))


@contextlib.asynccontextmanager
async def fronted(
    directory: Path, *sizes: int, proxies: str = "127.0.0.1", prefix: str = "", **settings: Any
) -> AsyncIterator[Fronted]:
    """Run so many replicas of each model behind a front."""
    async with contextlib.AsyncExitStack() as stack:
        models = []
        for index, size in enumerate(sizes or (2,)):
            replicas = [Replica(f"m{index}r{number}", directory, **settings) for number in range(size)]
            for one in replicas:
                one.connections = await stack.enter_async_context(listening(one.app, one.settings))
                one.address = ReplicaAddress(one.name, f"http://127.0.0.1:{port_of(one.connections)}")
            await wait_for_async(lambda: all(one.engine.ready for one in replicas))  # noqa: B023 - it is awaited here
            models.append(Some(replicas))
        named = [ModelOptions(model=MODEL if not index else f"other/{index}") for index in range(len(models))]
        chosen = Settings.model_validate({"drain_timeout_s": 1.0, **settings})
        options = ReplicaOptions(models=named)
        front = create_front(chosen, options, lambda: list[Replicas](models), Started())
        server = await stack.enter_async_context(listening(Below(front, prefix), chosen, proxies))
        address = f"http://127.0.0.1:{port_of(server)}"
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=20))
        yield Fronted(server, client, models)


@contextlib.asynccontextmanager
async def asking(replicas: Iterable[Replica], job_id: str) -> AsyncIterator[None]:
    """Have each replica ask a job's client for something, as the one that runs the job does."""

    async def ask(one: Replica) -> None:
        async with one.context.jobs.calls.call(job_id, one.name.encode()):
            pass

    calls = [asyncio.create_task(ask(one)) for one in replicas]
    try:
        yield
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def askers(socket: ClientConnection, number: int) -> set[str]:
    """Return so many of the replicas whose calls come over a job's socket, fewer where time ends."""
    found: set[str] = set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while len(found) < number:
                message = await socket.recv()
                if isinstance(message, bytes):
                    found |= {name for name in ("m0r0", "m0r1") if name.encode() in message}
    return found


def who(answer: httpx.Response) -> str:
    return answer.headers[REPLICA_HEADER]


def code_of(answer: httpx.Response) -> str:
    code: str = answer.json()["error"]["code"]
    return code
