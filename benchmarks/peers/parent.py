"""The command's end of a side: its process, asked one thing at a time, and given so long to answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final, Self

from benchmarks.processes import Event

_ROOT: Final = Path(__file__).parents[2]
_ANSWER_LIMIT_S: Final = 300
_END_LIMIT_S: Final = 20
_CHUNK_BYTES: Final = 1 << 16
_SHOWN: Final = 300


class SideError(Exception):
    """A side cannot go on, or not with this; the message is what the table says."""


class SideProcess:
    """One side.

    Args:
        part: ``local`` or ``serving``.
        name: Of the side.
        python: Interpreter that has its library.
        arguments: What it is told at the start.
        variables: Its environment, beside ours.

    Attributes:
        versions: Of its packages.
    """

    versions: dict[str, str]

    def __init__(
        self, part: str, name: str, python: Path, arguments: list[str], variables: Mapping[str, str]
    ) -> None:
        """Start it; it is ready when ``wait`` has returned.

        Raises:
            SideError: There is no such interpreter.
        """
        self.name = name
        self._read_fd, write_fd = os.pipe()
        self._printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._buffer = b""
        command = [str(python), "-m", "benchmarks.peers.child", part, name, *arguments]
        try:
            self._process = subprocess.Popen(
                [*command, "--events-fd", str(write_fd)],
                cwd=_ROOT,
                env={**os.environ, **variables},
                pass_fds=(write_fd,),
                stdin=subprocess.PIPE,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            os.close(self._read_fd)
            self._printed.close()
            raise SideError(str(error)) from error
        finally:
            os.close(write_fd)

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()

    def wait(self) -> None:
        """Wait until its library and models are there.

        Raises:
            SideError: They are not, and why.
        """
        self.versions = _checked(self._read())["versions"]

    def ask(self, request: Event) -> Event:
        """Return its answer.

        Raises:
            SideError: It cannot do this, failed at it, ended or took too long.
        """
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SideError(self._last_words()) from error
        return _checked(self._read())

    def close(self) -> None:
        """End the process, by asking and then by force."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1
        self._printed.close()

    def _read(self) -> Event:
        while b"\n" not in self._buffer:
            if not select.select([self._read_fd], [], [], _ANSWER_LIMIT_S)[0]:
                self._process.kill()
                raise SideError(f"no answer within {_ANSWER_LIMIT_S} s")
            chunk = os.read(self._read_fd, _CHUNK_BYTES)
            if not chunk:
                raise SideError(self._last_words())
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: Event = json.loads(line)
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").strip().splitlines() or [""]
        return f"ended with status {status}: {lines[-1][:_SHOWN]}"


def _checked(answer: Event) -> Event:
    for complaint in ("error", "not_offered"):
        if complaint in answer:
            raise SideError(answer[complaint])
    return answer
