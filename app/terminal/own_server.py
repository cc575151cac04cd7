"""A server of a command's own, which listens on a Unix socket for the length of the command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import httpx

from app.command_error import CommandError
from app.terminal.server import Server

_POLL_S: Final = 0.5
_END_S: Final = 60.0
_URL: Final = "http://localhost"


@contextlib.asynccontextmanager
async def own_server(arguments: Sequence[str]) -> AsyncIterator[Server]:
    """Yield a server once it is ready; CommandError without a message if its own is on the terminal."""
    key = secrets.token_urlsafe()
    with tempfile.TemporaryDirectory(prefix="nnsight-engine-") as folder:
        uds = str(Path(folder, "socket"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app", "serve", *arguments, "--uds", uds),
            env={**os.environ, "VLLM_API_KEY": key},
            start_new_session=True,  # Ctrl-C reaches the command alone, which then stops the server
        )
        try:
            await _ready(process, uds)
            async with Server(_URL, key, uds) as server:
                yield server
        finally:
            await _stop(process)


async def _ready(process: asyncio.subprocess.Process, uds: str) -> None:
    transport = httpx.AsyncHTTPTransport(uds=uds)
    async with httpx.AsyncClient(transport=transport, base_url=_URL) as client:
        while process.returncode is None:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/health/ready")).is_success:
                    return
            await asyncio.sleep(_POLL_S)
    # Ended by itself, it has said why, and that shall be the last line.
    is_killed = process.returncode < 0
    raise CommandError(
        f"the server for the batch was ended by signal {-process.returncode}" if is_killed else ""
    )


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()


__all__ = ["own_server"]
