"""How long the server takes from its command to its first ready answer.

    python -m benchmarks.startup [--repeats 3] [any argument of nnsight-engine serve]

The bundled model is converted before the clock starts, as it is on every start but the first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Final

import httpx
from rich.console import Console

from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET_S: Final = 45
_LIMIT_S: Final = 600
_POLL_S: Final = 0.1


class StartupError(Exception):
    """The server did not become ready; the message has what it printed."""


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="starts")
    args, options = parser.parse_known_args()
    console = Console()
    bundled_model_path()
    seconds = []
    try:
        for _ in range(args.repeats):
            seconds.append(seconds_to_ready(options))
            console.print(f"ready after {seconds[-1]:.1f} s")
    except StartupError as error:
        console.print(f"benchmarks: {error}", markup=False, soft_wrap=True)
        return 1
    console.print(f"Median {statistics.median(seconds):.1f} s (target, eager: {_TARGET_S} s)")
    return 0


def seconds_to_ready(options: Sequence[str]) -> float:
    """Start a server, wait until ``/health/ready`` answers 200, stop it, and return how long that took.

    Raises:
        StartupError: It ended before, or was not ready in time.
    """
    start = time.perf_counter()
    with served(options, {}):
        return time.perf_counter() - start


@contextlib.contextmanager
def served(options: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    """Start a server, and give its URL once it is ready; it is stopped in the end.

    Args:
        options: Of ``nnsight-engine serve``.
        variables: Environment variables beside our own.

    Raises:
        StartupError: It ended before, or was not ready in time.
    """
    port = _free_port()
    command = [sys.executable, "-m", "app.cli", "serve", *options, "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    with tempfile.TemporaryFile() as printed:
        start = time.perf_counter()
        server = subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT)
        try:
            while not _is_ready(port):
                if server.poll() is not None or time.perf_counter() - start > _LIMIT_S:
                    raise StartupError(_message(server, printed))
                time.sleep(_POLL_S)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=5).is_success
    except httpx.TransportError:
        return False


def _message(server: subprocess.Popen[bytes], printed: IO[bytes]) -> str:
    printed.seek(0)
    output = printed.read().decode(errors="replace")
    ended = f"gone with status {server.returncode}" if server.returncode is not None else "still running"
    return f"the server must be ready within {_LIMIT_S} s, it is {ended}; its output:\n{output}"


if __name__ == "__main__":
    sys.exit(main())
