"""The real server as a process of its own, started as a person starts it.

For tests of everything between the command line and the model. The process leads a process
group, so that the engine's processes end with it even when it can no longer end them itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from benchmarks.servers import ServerError, free_port

PROJECT: Final = Path(__file__).resolve().parents[2]
_OUTPUT_SHOWN: Final = 8000


class Server:
    """``nnsight-engine serve`` for the length of a ``with`` block.

    The model runs in float32 unless the arguments name another dtype, as it does where bfloat16 is slow.

    Args:
        model: A model's name or folder; None for the bundled one.
        arguments: More of the command line.
        command: What to run before the model; ours where absent.
        ready_path: What answers 200 once requests are served.
        environment: Variables beside this process's own, of which vLLM's are left out: other tests set
            them for engines of theirs.
        cache_dir: ``XDG_CACHE_HOME`` of the server; None for the real one, whose bundled model is reused.
        ready_timeout_s: How long the start may take.
        stop_timeout_s: How long the end may take before the process is killed.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        arguments: Sequence[str] = (),
        command: Sequence[str] = ("-m", "app", "serve"),
        ready_path: str = "/health/ready",
        environment: dict[str, str] | None = None,
        cache_dir: Path | None = None,
        ready_timeout_s: float = 400.0,
        stop_timeout_s: float = 30.0,
    ) -> None:
        """Choose a port; nothing runs yet."""
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.start_s = 0.0
        self._command = [sys.executable, *command]
        self._ready_path = ready_path
        self._command += [] if model is None else [model]
        self._command += ["--port", str(self.port), "--dtype", "float32", *arguments]
        # Jobs and keys of this server alone, not those of the machine's users.
        self._data = tempfile.TemporaryDirectory()
        self._environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "NNSIGHT_ENGINE_DATA_DIR": self._data.name,
            **(environment or {}),
        }
        if cache_dir is not None:
            self._environment["XDG_CACHE_HOME"] = str(cache_dir)
        self._ready_timeout_s = ready_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the server

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The server's process; only inside the block."""
        if self._process is None:
            raise ServerError("the server runs only inside its `with` block")
        return self._process

    def output(self) -> str:
        """Return the last that the server wrote, to either stream."""
        size = os.fstat(self._output.fileno()).st_size
        tail = os.pread(self._output.fileno(), _OUTPUT_SHOWN, max(0, size - _OUTPUT_SHOWN))
        return tail.decode("utf-8", "replace")

    def whole_output(self) -> str:
        """Return everything that the server wrote, to either stream."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode("utf-8", "replace")

    def __enter__(self) -> Self:
        """Start the server and wait until it is ready; raises ServerError."""
        self._process = subprocess.Popen(
            self._command,
            cwd=PROJECT,
            env={**_inherited(), **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server as an operator does, and what is left of it by force."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._stop_timeout_s)
        # The group outlives its leader for as long as one of the engine's processes does.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._output.close()

    def _wait_ready(self) -> None:
        started = time.monotonic()
        deadline = started + self._ready_timeout_s
        with httpx.Client(base_url=self.base_url, timeout=5.0) as client:
            while not _is_ready(client, self._ready_path):
                if self.process.poll() is not None:
                    raise ServerError(
                        f"the server ended ({self.process.returncode}) before it was ready:\n{self.output()}"
                    )
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"the server was not ready within {self._ready_timeout_s:g} s:\n{self.output()}"
                    )
                time.sleep(0.1)
        self.start_s = time.monotonic() - started


def _is_ready(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).is_success
    except httpx.TransportError:
        return False


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
