"""The application over the fake engine, and a port for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from app.auth.keys import GivenKeys
from app.components import Components
from app.engine.client import TraceEngine
from app.main import create_app, new_store
from app.server.http_options import HttpOptions
from app.server.uvicorn import DrainingServer, server_config
from app.settings import Bounds, Settings
from tests.databases import give_tables
from tests.fakes.engine import FakeBehaviour, FakeEngineClient
from tests.waiting import wait_for_async


class Application:
    """An application with its settings and its engine; its data lie in a folder."""

    def __init__(
        self,
        folder: Path,
        behaviour: FakeBehaviour | None = None,
        *,
        traces: Mapping[str, TraceEngine] | None = None,
        engine: type[FakeEngineClient] = FakeEngineClient,
        given_keys: GivenKeys | None = None,
        http: HttpOptions | None = None,
        **settings: Any,
    ) -> None:
        folders = {"result_dir": folder / "results", "data_dir": folder / "data"}
        names = {field.name for field in dataclasses.fields(Bounds)}
        bounds = {name: settings.pop(name) for name in names & settings.keys()}
        chosen = Settings.model_validate({**folders, "drain_timeout_s": 1.0, **settings})
        self.settings = chosen.with_bounds(**bounds)
        store = new_store(self.settings)
        self.engine = engine(self.settings, store, behaviour)
        self.engine.traces = traces or self.engine.traces
        self.app = create_app(self.settings, self.engine, store, given_keys=given_keys, http=http)
        self.context: Components = self.app.state.components

    @contextlib.asynccontextmanager
    async def started(self, *, raises: bool = True) -> AsyncIterator[httpx.AsyncClient]:
        """Run it without a port; yields a client."""
        await give_tables(self.settings.data_dir, self.settings.database_url)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=raises)
        async with (
            self.app.router.lifespan_context(self.app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await asyncio.sleep(0)
            yield client

    @contextlib.asynccontextmanager
    async def listening(self, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        """Run it on a free port; yields a client."""
        async with listening(self.app, self.settings, **options) as server:
            url = f"http://127.0.0.1:{port_of(server)}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                yield client


@contextlib.asynccontextmanager
async def listening(
    app: ASGIApp, settings: Settings, proxies: str = "127.0.0.1", **options: Any
) -> AsyncIterator[Any]:
    """Serve an application as the command does; yields uvicorn's server."""
    await give_tables(settings.data_dir, settings.database_url)
    settings = settings.model_copy(update={"port": 0, "trusted_proxies": proxies})
    server = DrainingServer(server_config(app, settings, **options))
    serving = asyncio.create_task(server.serve())
    await wait_for_async(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        await serving


def port_of(server: Any) -> int:
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port
