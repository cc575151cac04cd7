"""A server over the fake engine, and a client for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_schemas.administration import Scope
from app.settings import Settings
from app.storage.database import job_folder
from tests.fakes.engine import FakeBehaviour
from tests.integration.scripted_traces import Jobs, ScriptedEngine
from tests.integration.serving import Application
from tests.integration.tenants import Tenants
from tests.waiting import wait_for_async


class Server:
    """A running application, its engine, and a client."""

    def __init__(self, served: Application, client: httpx.AsyncClient) -> None:
        self.app = served.app
        self.engine = served.engine
        self.client = client
        self.context = served.context

    async def complete(self, **body: object) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "one two three", **body})

    async def until_idle(self) -> None:
        await wait_for_async(lambda: not self.context.lifecycle.num_in_flight)


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve(tmp_path: Path, database_url: str) -> Serve:
    @contextlib.asynccontextmanager
    async def serving(behaviour: FakeBehaviour | None = None, **settings: Any) -> AsyncIterator[Server]:
        served = Application(tmp_path, behaviour, **{"database_url": database_url, **settings})
        async with served.started() as client:
            yield Server(served, client)

    return serving


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    """A server with the default settings."""
    async with serve() as server:
        yield server


@pytest.fixture
def jobs_folder(tmp_path: Path, database_url: str) -> Path:
    """Where the files of jobs lie, of servers made by ``serve``."""
    return job_folder(Settings(data_dir=tmp_path / "data", database_url=database_url)) / "jobs"


ErrorCheck = Callable[[httpx.Response, int, str], str]


@pytest.fixture
def error_of() -> ErrorCheck:
    """Check a response for its API's error shape, a status and a code; return the message."""

    def check(response: httpx.Response, status: int, code: str) -> str:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        body = response.json()
        assert body.pop("type", "error") == "error"  # beside it on /v1/messages
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == code
        return str(body["error"]["message"])

    return check


@pytest.fixture
def with_jobs(serve: Serve) -> Any:
    @contextlib.asynccontextmanager
    async def serving(behaviour: FakeBehaviour | None = None, **settings: Any) -> AsyncIterator[Jobs]:
        engine = ScriptedEngine()
        async with serve(behaviour, traces={"vllm": engine}, **settings) as server:
            yield Jobs(server, engine)

    return serving


@pytest.fixture
async def tenants(serve: Serve) -> AsyncIterator[Tenants]:
    async with serve() as server:
        found = Tenants(server)
        await found.headers("operator", Scope.ADMIN)
        yield found
