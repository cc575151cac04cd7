"""A server over the fake engine as a process: prints its address, and runs until it is stopped.

python -m tests.integration.plain_server FOLDER
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import uvicorn

from app.main import create_app, new_store
from app.observability.logs import start_logs
from app.settings import Settings
from nnsight_engine.core.engine_counts import EngineCounts
from tests.fakes.engine import FakeBehaviour, FakeEngineClient
from tests.waiting import wait_for_async


async def main(folder: Path) -> None:
    """Serve until SIGTERM."""
    settings = Settings(result_dir=folder / "results", data_dir=folder / "data", drain_timeout_s=1.0)
    start_logs(settings)
    store = new_store(settings)
    behaviour = FakeBehaviour(counts=EngineCounts(steps={"plain": 7, "tap": 5, "eager": 2}))
    app = create_app(settings, FakeEngineClient(settings, store, behaviour), store)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    serving = asyncio.create_task(server.serve())
    await wait_for_async(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)  # noqa: T201 - for the test
    await serving


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
