"""Servers as users start them: ours, and vLLM's own, with the same engine and the same environment.

A server is a process with its engine's process; both end with the block that it was started for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Final

import httpx

from app.process_environment import set_engine_defaults
from benchmarks.precision import DTYPE_NAME

MODEL_NAME: Final = "bundled"
"""The name of the model on a server of ``ServerKind``."""

_LIMIT_S: Final = 600
_POLL_S: Final = 0.05


class ServerError(Exception):
    """A server that did not become ready; the message has its output."""


class ServerKind(enum.StrEnum):
    """Our server or vLLM's."""

    OURS = "ours"
    VLLM = "vLLM's own"


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyServer:
    """A server that is ready.

    Attributes:
        began: When its command was given, on the clock of ``time.perf_counter``.
        listening_s: Seconds from then to the first answer of any kind.
        ready_s: Seconds from then to readiness.
    """

    url: str
    began: float
    listening_s: float
    ready_s: float


def command_of(kind: ServerKind, model: str, *, compiled: bool, options: Sequence[str] = ()) -> list[str]:
    """Return the arguments of Python that serve ``model``, apart from the port.

    Our engine is eager by default and vLLM's own is compiled; ``options`` are engine arguments of both.
    """
    named = ["--served-model-name", MODEL_NAME, "--dtype", DTYPE_NAME, *options]
    if kind is ServerKind.OURS:
        return ["-m", "app", "serve", model, *named, *(["--compile"] if compiled else [])]
    eager = [] if compiled else ["--enforce-eager"]
    # Not `vllm serve`, which asks for a package "vllm" that the one for CPUs is not.
    module = "vllm.entrypoints.openai.api_server"
    return ["-m", module, "--model", model, *named, "--host", "127.0.0.1", *eager]


@contextlib.contextmanager
def running(
    command: Sequence[str], variables: Mapping[str, str] | None = None, port: int | None = None
) -> Iterator[ReadyServer]:
    """Run a command of ``command_of`` until the block ends; yields the server once it is ready.

    Raises:
        ServerError: It ended before, or was not ready in time.
    """
    set_engine_defaults()  # which vLLM's own server gets too
    port = free_port() if port is None else port
    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(tempfile.TemporaryFile())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **own_folders(folder), **(variables or {})}
        start = time.perf_counter()
        server = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        stack.callback(_end, server)
        ready = "health/ready" if command[1] == "app" else "health"
        listening_s: float | None = None
        while (status := _status(f"http://127.0.0.1:{port}/{ready}")) != httpx.codes.OK:
            if status is not None and listening_s is None:
                listening_s = time.perf_counter() - start
            if server.poll() is not None or time.perf_counter() - start > _LIMIT_S:
                raise ServerError(_message(server, printed))
            time.sleep(_POLL_S)
        ready_s = time.perf_counter() - start
        yield ReadyServer(f"http://127.0.0.1:{port}", start, listening_s or ready_s, ready_s)


@contextlib.contextmanager
def served(options: Sequence[str], variables: Mapping[str, str], port: int | None = None) -> Iterator[str]:
    """Run our server until the block ends, on a free port by default; yields its URL once it is ready.

    Raises:
        ServerError: It ended before, or was not ready in time.
    """
    with running(["-m", "app", "serve", *options], variables, port) as server:
        yield server.url


def created_key(tenant: str, variables: Mapping[str, str], *options: str) -> str:
    """Make a key with the command, in the database that the variables name, and return it."""
    command = [sys.executable, "-m", "app", "keys", "create", "--tenant", tenant, *options]
    return subprocess.check_output(command, text=True, env={**os.environ, **variables}).strip()


def own_folders(folder: str) -> dict[str, str]:
    """Return the variables that keep the server away from the keys and jobs of the user."""
    return {"NNSIGHT_ENGINE_DATA_DIR": f"{folder}/data", "NNSIGHT_ENGINE_RESULT_DIR": f"{folder}/results"}


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    server.wait()


def free_port() -> int:
    """Return a port of the loopback interface on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _status(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return None


def _message(server: subprocess.Popen[bytes], printed: IO[bytes]) -> str:
    printed.seek(0)
    output = printed.read().decode(errors="replace")
    ended = f"gone with status {server.returncode}" if server.returncode is not None else "still running"
    return f"the server must be ready within {_LIMIT_S} s, it is {ended}; its output:\n{output}"
