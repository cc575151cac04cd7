"""The server in this process over a real socket, so that a test can ask as a client and look inside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import uvicorn

from app.engine.vllm_arguments import parse
from app.engine.vllm_client import VLLMEngineClient
from app.main import create_app, new_store
from app.server.sockets import listening_socket
from app.settings import Settings
from tests.narrow_model import NAME

MODEL: Final = NAME
T = TypeVar("T")


class Live:
    """A running server: a client of it, and the engine behind it."""

    def __init__(
        self,
        engine: VLLMEngineClient,
        http: httpx.AsyncClient,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Keep the parts; ``loop`` is the server's, if that is another one than the test's."""
        self.engine = engine
        self.http = http
        self._loop = loop

    async def post(self, path: str = "/v1/completions", /, **body: Any) -> httpx.Response:
        """Send a request, greedy and short unless it says otherwise."""
        return await self.http.post(path, json=self._body(body))

    async def events(self, path: str = "/v1/completions", /, **body: Any) -> list[Any]:
        """Stream a request and return its events, without the closing one."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        frames = [frame for frame in response.text.split("\n\n") if frame]
        assert frames[-1] == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]

    async def leave_after(self, num_events: int, **body: Any) -> None:
        """Stream a request and go away after some events."""
        async with self.http.stream(
            "POST", "/v1/completions", json=self._body({**body, "stream": True})
        ) as response:
            seen = 0
            async for line in response.aiter_lines():
                seen += line.startswith("data: ")
                if seen == num_events:
                    return

    async def held(self) -> dict[str, int]:
        """Return what worker and router hold once every request has ended there."""
        await asyncio.sleep(0.2)
        for _ in range(2):
            await self.post(prompt="a", max_tokens=2)
        (counts,) = await self.on_server(self.engine.engine.collective_rpc("count_interventions"))
        engine = self.engine.engine
        return {**counts, "open": len(engine.router) + len(engine.traces)}

    async def on_server(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the server's loop."""
        if self._loop is None:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @contextlib.asynccontextmanager
    async def in_this_loop(self) -> AsyncIterator[Live]:
        """Give the same server to tests with a loop of their own."""
        async with httpx.AsyncClient(base_url=self.http.base_url, timeout=120) as http:
            yield Live(self.engine, http, self._loop)

    @staticmethod
    def _body(body: dict[str, Any]) -> dict[str, Any]:
        return {"model": MODEL, "temperature": 0, "max_tokens": 8} | body


@contextlib.asynccontextmanager
async def live_server(
    model: Path, result_dir: Path, *options: str, **settings_given: Any
) -> AsyncIterator[Live]:
    """Serve a model in float32 on a free port for the length of the block."""
    chosen = {"port": 0, "drain_timeout_s": 5, "max_engine_restarts": 0, **settings_given}
    settings = Settings(result_dir=result_dir, **chosen)
    store = new_store(settings)
    given = ["--served-model-name", MODEL, "--max-model-len", "1024", "--dtype", "float32", *options]
    args = parse([str(model), *given])
    engine = VLLMEngineClient(args, settings, store)
    config = uvicorn.Config(create_app(settings, engine, store), port=0, log_level="warning")
    sock = listening_socket(config)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    base_url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        await asyncio.wait_for(engine.started.wait(), timeout=400)
        async with httpx.AsyncClient(base_url=base_url, timeout=120) as http:
            yield Live(engine, http)
    finally:
        server.should_exit = True
        await serving


@contextlib.contextmanager
def live_server_in_a_thread(model: Path, result_dir: Path, **settings_given: Any) -> Iterator[Live]:
    """Serve it to tests of several modules, whose loops end with them; each has ``in_this_loop``."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="live server")
    thread.start()
    serving = live_server(model, result_dir, **settings_given)
    try:
        live = asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result()
        try:
            yield Live(live.engine, live.http, loop)
        finally:
            asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
