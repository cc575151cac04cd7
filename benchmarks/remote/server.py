"""The server of the benchmark, in this process, so that the same trace can be run beside its HTTP too."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Coroutine
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
from nnsight_engine.remote_backend.frames import Frame, FrameKind
from nnsight_engine.remote_backend.messages import TraceRequest

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


async def result_of(traces: TraceEngine, request: TraceRequest, job_id: str) -> Frame:
    """Run a trace as a route does, and return its result."""
    frames = traces.run_trace(request, job_id)
    found = [frame async for frame in frames]
    await frames.aclose()
    if found[-1].kind is not FrameKind.RESULT:
        raise RuntimeError(f"a trace ended with {found[-1].kind.name}")
    return found[-1]
