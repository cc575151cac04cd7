"""Objects in processes of their own: a table's cases, clients, and sides of a comparison.

The child prints to a temporary file, which is shown when the child fails. It needs this module alone, so it
can run in another virtual environment.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, Final, Self

_ROOT: Final = Path(__file__).parents[1]
_END_LIMIT_S: Final = 20
_OUTPUT_BYTES: Final = 8000
_LINE_CHARS: Final = 300


class ProcessError(Exception):
    """A child failed, ended or took too long; ``output`` is the end of its output."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class ChildObject:
    """The object that ``factory``, a ``module:name``, returns in a new process; its ``close`` ends it there.

    Args:
        factory: A class or function, called in the child.
        arguments: Its arguments.
        variables: Environment variables that are added to ours.
        python: The child's interpreter.
        limit_s: Seconds that a call may take.

    Raises:
        ProcessError: There is no such interpreter.
    """

    def __init__(
        self,
        factory: str,
        *arguments: Any,
        variables: Mapping[str, str] | None = None,
        python: str = sys.executable,
        limit_s: float | None = None,
    ) -> None:
        self._factory, self._limit_s = factory, limit_s
        self._is_given_up = False
        self._connection, other = Pipe()
        self._printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.process", str(other.fileno())],
                cwd=_ROOT,
                env={**os.environ, **(variables or {})},
                pass_fds=(other.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            self._connection.close()
            self._printed.close()
            raise ProcessError(str(error)) from error
        finally:
            other.close()
        with contextlib.suppress(OSError):  # the first call reports a child that has ended
            self._connection.send((factory, arguments))

    def __enter__(self) -> Self:
        """Return the object."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process: it ends with its connection, or is killed."""
        self._connection.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._printed.close()

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method; raises ProcessError where it fails, or where an earlier call took too long."""
        try:
            if not self._is_given_up:
                self._connection.send((method, arguments, named))
                self._is_given_up = not self._connection.poll(self._limit_s)
            if self._is_given_up:
                self._process.kill()
                message = f"{self._factory} was ended: it gave no answer within {self._limit_s} s"
                raise ProcessError(message, self.printed())
            return self._connection.recv()
        except (EOFError, OSError) as error:
            status, output = self._process.wait(), self.printed()
            last = (output.strip().splitlines() or [""])[-1][:_LINE_CHARS]
            message = f"{self._factory} ended with status {status}: {last}"
            raise ProcessError(message, output) from error

    def printed(self) -> str:
        """Return the end of the child's output."""
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - _OUTPUT_BYTES))
        return self._printed.read().decode(errors="replace")


def _main() -> None:
    """Make the object and answer calls until the connection ends; an exception ends the process."""
    connection: Any = Connection(int(sys.argv[1]))
    factory, arguments = connection.recv()
    module, _, name = factory.partition(":")
    with contextlib.ExitStack() as stack:
        made = getattr(importlib.import_module(module), name)(*arguments)
        stack.callback(getattr(made, "close", lambda: None))
        stack.enter_context(contextlib.suppress(EOFError))
        while True:
            method, arguments, named = connection.recv()
            connection.send(getattr(made, method)(*arguments, **named))


if __name__ == "__main__":
    _main()
