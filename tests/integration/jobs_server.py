"""A server with a scripted engine, as a process of its own that a test may kill.

``python -m tests.integration.jobs_server DIRECTORY``; it prints its port when it listens. Traces that hang
are released by a file ``release`` in the directory.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn

from app.main import create_app, new_store
from app.settings import Settings
from tests.fakes.engine import FakeEngineClient
from tests.integration.scripted_traces import ScriptedEngine
from tests.waiting import wait_for_async


async def serve(directory: Path) -> None:
    settings = Settings(
        result_dir=directory / "results", data_dir=directory / "data", max_running_jobs=3, drain_timeout_s=0.2
    )
    store = new_store(settings)
    scripted = ScriptedEngine()
    engine = FakeEngineClient(settings, store)
    engine.traces = {"vllm": scripted}
    config = uvicorn.Config(create_app(settings, engine, store), log_level="warning")
    server = uvicorn.Server(config)
    sock = config.bind_socket()
    releasing = asyncio.create_task(release(scripted, directory / "release"))
    print(sock.getsockname()[1], flush=True)  # noqa: T201 - the test reads it
    await server.serve(sockets=[sock])
    releasing.cancel()


async def release(engine: ScriptedEngine, file: Path) -> None:
    await wait_for_async(file.exists, timeout_s=600)
    engine.released.set()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
