"""A server over the fake engine, and a client for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from api_schemas.keys import Scope
from app.context import Context
from app.engine.traces import TraceEngine
from app.main import create_app, new_store
from app.settings import Settings
from app.storage.database_folders import job_folder
from tests.fakes.engine import FakeBehaviour, FakeEngineClient
from tests.integration.scripted_traces import ScriptedEngine
from tests.integration.served_jobs import Jobs
from tests.integration.tenants import Tenants


class Server:
    """A running application, its engine, and a client."""

    def __init__(self, app: FastAPI, engine: FakeEngineClient, client: httpx.AsyncClient) -> None:
        self.app = app
        self.engine = engine
        self.client = client
        self.context: Context = app.state.context

    async def complete(self, **body: object) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "one two three", **body})

    async def until_idle(self) -> None:
        assert await self.context.lifecycle.wait_idle(60)


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve(tmp_path: Path, database_url: str) -> Serve:
    @contextlib.asynccontextmanager
    async def serving(
        behaviour: FakeBehaviour | None = None,
        *,
        traces: Mapping[str, TraceEngine] | None = None,
        **settings: object,
    ) -> AsyncIterator[Server]:
        values = {
            "result_dir": tmp_path / "results",
            "data_dir": tmp_path / "data",
            "database_url": database_url,
            "drain_timeout_s": 1.0,
            **settings,
        }
        chosen = Settings.model_validate(values)
        store = new_store(chosen)
        engine = FakeEngineClient(chosen, store, behaviour)
        engine.traces = traces or engine.traces
        app = create_app(chosen, engine, store)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await asyncio.sleep(0)
            yield Server(app, engine, client)

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
    """Check a response for OpenAI's error shape, a status and a code; return the message."""

    def check(response: httpx.Response, status: int, code: str) -> str:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        body = response.json()
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
