"""The real command's server over the fake engine, as a process that a test may signal or kill.

It listens on the port that is its argument, and ends as ``nnsight-engine serve`` does. The variable
``DIES_AFTER_S`` lets its engines live for so long; ``STALLS_UNTIL`` has the list of models stop the event
loop until there is such a file; with ``RELEASE_FILE`` its traces are scripted, and those that hang end once
there is that file; ``ARGUMENTS`` has other arguments as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import httpx
from rich.console import Console

from app.command_error import CommandError
from app.commands.serve import _run_server
from app.settings import Settings
from app.storage.results import ResultStore
from nnsight_engine.core.work_context import EngineCounts
from tests.databases import give_tables
from tests.fakes.engine import FakeBehaviour, FakeEngineClient
from tests.integration.scripted_traces import ScriptedEngine
from tests.waiting import wait_for, wait_for_async

PROJECT: Final = Path(__file__).resolve().parents[2]
STEPS: Final = {"plain": 7, "tap": 5, "eager": 2}
"""Its engine's."""

ARGUMENTS: Final[dict[str, Any]] = {
    "allow_credentials": False,
    "allowed_headers": ["*"],
    "allowed_methods": ["*"],
    "allowed_origins": [],
    "api_key": None,
    "disable_access_log_for_endpoints": None,
    "disable_fastapi_docs": False,
    "disable_uvicorn_access_log": False,
    "enable_request_id_headers": False,
    "enable_ssl_refresh": False,
    "h11_max_header_count": 256,
    "h11_max_incomplete_event_size": 4194304,
    "middleware": [],
    "root_path": "",
    "ssl_ca_certs": None,
    "ssl_cert_reqs": 0,
    "ssl_certfile": None,
    "ssl_ciphers": None,
    "ssl_keyfile": None,
    "uds": None,
    "uvicorn_log_level": "info",
}
"""What the command reads of vLLM's arguments, with vLLM's defaults."""


class _Engine(FakeEngineClient):
    def __init__(self, args: Any, settings: Settings, store: ResultStore) -> None:
        del args
        counts = EngineCounts(steps=dict(STEPS))
        super().__init__(settings, store, FakeBehaviour(delay_s=0.05, counts=counts))
        self.started = asyncio.Event()  # of what the command prints then, there is nothing here
        self.scripted = ScriptedEngine()
        if "RELEASE_FILE" in os.environ:
            self.traces = {"vllm": self.scripted}

    async def start(self) -> None:
        await super().start()
        if "RELEASE_FILE" in os.environ:
            self._releasing = asyncio.create_task(self._release(Path(os.environ["RELEASE_FILE"])))

    async def _release(self, file: Path) -> None:
        await wait_for_async(file.exists, timeout_s=600)
        self.scripted.released.set()

    async def models(self) -> dict[str, Any]:
        if "STALLS_UNTIL" in os.environ:
            wait_for(Path(os.environ["STALLS_UNTIL"]).exists, 600)
        return await super().models()

    async def died(self) -> None:
        life_s = float(os.environ.get("DIES_AFTER_S", "inf"))
        if life_s == float("inf"):
            await asyncio.Event().wait()
        await asyncio.sleep(life_s)
        self.behaviour.is_dead = True


class Process:
    """A server's process, and a client of it that uses each connection once, as those who come late do."""

    def __init__(self, process: asyncio.subprocess.Process, client: httpx.AsyncClient) -> None:
        self.process = process
        self.client = client
        self.lines: list[str] = []

    async def stream(self, body: dict[str, Any]) -> list[str]:
        """Return the lines of a stream, which are in ``lines`` as they come."""
        self.lines = []
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                self.lines += [line] if line else []
        return self.lines

    async def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self.client.get("/health/ready")).status_code == 200
        return False

    async def draining(self) -> bool:
        return bool((await self.client.get("/health/live")).json() == {"status": "draining"})

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 45)


@contextlib.asynccontextmanager
async def started(folder: Path, **environment: str) -> AsyncIterator[Process]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "NNSIGHT_ENGINE_DATA_DIR": str(folder / "data"),
        "NNSIGHT_ENGINE_RESULT_DIR": str(folder / "results"),
        **environment,
    }
    await give_tables(folder / "data")
    process = await asyncio.create_subprocess_exec(
        *("env", *(f"{name}={value}" for name, value in settings.items())),
        sys.executable, "-m", "tests.integration.command_server", str(port),
        cwd=PROJECT, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    limits = httpx.Limits(max_keepalive_connections=0)
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=20, limits=limits
        ) as client:
            yield Process(process, client)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> int:
    """Serve until stopped."""
    settings = Settings(port=int(sys.argv[1]))
    args = argparse.Namespace(**ARGUMENTS | json.loads(os.environ.get("ARGUMENTS", "{}")))
    modules = SimpleNamespace(VLLMEngineClient=_Engine)
    try:
        _run_server(args, settings, modules, Console(stderr=True))
    except CommandError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
