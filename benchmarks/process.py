"""Processes that benchmarks start and talk to: workers, clients, and peers in another environment.

A child runs a module of this package. It receives commands as lines of JSON on standard input and answers by
lines through a pipe of its own; what it prints goes to a temporary file and is shown only when it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

Event = dict[str, Any]

# Where 4 KiB pages happen to lie makes one of two equal engines in a process up to 15 % slower than
# the other; with huge pages they differ by less than 1 %. The control shows it.
HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "KINETO_LOG_LEVEL": "99",
    # Both engines of a comparison live in one process, driven step by step.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # GiB of KV cache; no core is kept for anything else.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # Interventions are written for the V1 runner; plain vLLM gets the same one.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""What vLLM reads when it is imported into a process that drives its engine."""

_ROOT: Final = Path(__file__).parents[1]
_CHUNK_BYTES: Final = 1 << 16
_END_LIMIT_S: Final = 20
_OUTPUT_BYTES: Final = 8000
_LINE_CHARS: Final = 300


class ProcessError(Exception):
    """A child failed, ended or took too long.

    Attributes:
        output: The end of what it printed.
    """

    def __init__(self, message: str, output: str = "") -> None:
        """Keep the output beside the message."""
        super().__init__(message)
        self.output = output


class Process:
    """``python -m module arguments --events-fd N``, ended with the ``with`` block.

    ``variables`` are added to our environment; an answer may take ``limit_s``, None is no limit.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        python: str = sys.executable,
        limit_s: float | None = None,
    ) -> None:
        """Start it; raises ProcessError where there is no such interpreter."""
        self._module, self._limit_s, self._buffer = module, limit_s, b""
        self._read_fd, write_fd = os.pipe()
        self._printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments, "--events-fd", str(write_fd)],
                cwd=_ROOT,
                env={**os.environ, **(variables or {})},
                pass_fds=(write_fd,),
                stdin=subprocess.PIPE,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            os.close(self._read_fd)
            self._printed.close()
            raise ProcessError(str(error)) from error
        finally:
            os.close(write_fd)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()

    def ask(self, **command: Any) -> Any:
        """Send a command and return its answer; raises ProcessError where there is none."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure() from error
        return self.read()

    def read(self) -> Any:
        """Return the next answer; raises ProcessError where there is none."""
        found = self._line()
        if found is None:
            raise self._failure()
        return found

    def events(self) -> Iterator[Event]:
        """Yield what a child without commands reports; raises ProcessError where it fails."""
        while (event := self._line()) is not None:
            yield event
        if self._process.wait():
            raise self._failure()

    def printed(self) -> str:
        """Return the end of what it printed."""
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - _OUTPUT_BYTES))
        return self._printed.read().decode(errors="replace")

    def close(self) -> None:
        """End the process: ask first, then force it."""
        if self._printed.closed:
            return
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read_fd)
        self._printed.close()

    def _line(self) -> Any:
        while b"\n" not in self._buffer:
            if not select.select([self._read_fd], [], [], self._limit_s)[0]:
                self._process.kill()
                raise ProcessError(f"no answer within {self._limit_s} s", self.printed())
            chunk = os.read(self._read_fd, _CHUNK_BYTES)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _failure(self) -> ProcessError:
        status, output = self._process.wait(), self.printed()
        last = (output.strip().splitlines() or [""])[-1][:_LINE_CHARS]
        return ProcessError(f"{self._module} ended with status {status}: {last}", output)


class EventPipe:
    """The child's end of the pipe that ``--events-fd`` names."""

    def __init__(self, fd: int) -> None:
        """Take over the descriptor."""
        self._stream = os.fdopen(fd, "w", encoding="utf-8", buffering=1)

    def send(self, event: Any) -> None:
        """Send one line."""
        self._stream.write(json.dumps(event) + "\n")

    def serve(self, answer: Callable[..., Any]) -> None:
        """Answer every command until standard input ends."""
        for line in sys.stdin:
            self.send(answer(**json.loads(line)))


def events_fd(arguments: Sequence[str]) -> tuple[list[str], int]:
    """Split a child's command line into its own arguments and the descriptor at its end."""
    return list(arguments[1:-2]), int(arguments[-1])
