"""Our server in the benchmark's own process, so that the same trace can run without HTTP too."""

from __future__ import annotations

import asyncio
import copy
import itertools
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn

from app.engine.traces import TraceEngine
from app.engine.vllm_arguments import parse
from app.engine.vllm_client import VLLMEngineClient
from app.listen_socket import listening_socket
from app.main import create_app, new_store
from app.settings import Settings
from benchmarks.clients.trace_client import LAYER, PROMPT
from nnsight_engine import save
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.client.http import HttpTransport
from nnsight_engine.remote_backend.client.transport import Progress
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.vllm_backend.vllm import VLLM

T = TypeVar("T")


class BenchmarkServer:
    """Serves a model on a thread; a context manager."""

    def __init__(self, model: str) -> None:
        """Prepare to serve ``model``."""
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        settings = Settings(result_dir=folder / "results", data_dir=folder / "data")
        store = new_store(settings)
        args = parse([model, "--max-model-len", "1024"])
        self.engine = VLLMEngineClient(args, settings, store)
        config = uvicorn.Config(create_app(settings, self.engine, store), port=0, log_level="error")
        self._server = uvicorn.Server(config)
        self._socket = listening_socket(config)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            self._loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[self._socket]))

    def __enter__(self) -> Self:
        """Start, and wait until the model answers."""
        self._thread.start()
        while not self.engine.ready:
            time.sleep(0.1)
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the server and its engine."""
        self._server.should_exit = True
        self._thread.join()
        self._folder.cleanup()

    @property
    def traces(self) -> TraceEngine:
        """What runs traces."""
        return self.engine.trace_engines()["vllm"]

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class _RecordingTransport(HttpTransport):
    """Keeps the message that a trace sends."""

    request: TraceRequest

    def run(self, request: TraceRequest, progress: Progress | None = None) -> Iterator[Frame]:
        self.request = request
        yield from super().run(request, progress)


class ServedTraces:
    """The small trace of ``trace_client``, run in the server's process."""

    def __init__(self, server: BenchmarkServer, model: str) -> None:
        """Record the message as a client sends it."""
        self._server, self._numbers = server, itertools.count()
        client, transport = VLLM(model, remote=server.url), _RecordingTransport(server.url)
        with client.trace(PROMPT, max_tokens=1, temperature=0, backend=RemoteBackend(transport=transport)):
            hidden = save(client.layers[LAYER].output[-1])
        del hidden
        self._trusted = transport.request
        self._trusted.sandbox_of = None
        self._sandboxed = copy.copy(self._trusted)
        self._sandboxed.sandbox_of = "benchmark"

    def seconds(self, count: int, *, is_sandboxed: bool = False) -> list[float]:
        """Run the trace several times; returns how long each took."""

        async def run() -> list[float]:
            return [await self.run_one(is_sandboxed=is_sandboxed) for _ in range(count)]

        return self._server.wait(run())

    async def run_one(self, *, is_sandboxed: bool) -> float:
        """Run the trace as a route does, on the server's loop, up to the bytes of its result."""
        request = self._sandboxed if is_sandboxed else self._trusted
        start = time.perf_counter()
        frames = self._server.traces.run_trace(request, f"benchmark-{next(self._numbers)}")
        found = [frame async for frame in frames]
        await frames.aclose()
        if found[-1].kind is not FrameKind.RESULT:
            raise RuntimeError(f"a trace must end with a result, it ended with {found[-1].kind.name}")
        return time.perf_counter() - start
