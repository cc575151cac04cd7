"""A client of a benchmark in a process of its own, which answers each line of JSON with another.

A process, since a client in the benchmark's own would share an interpreter with what it measures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Self


class LineProcessError(Exception):
    """The process ended where it was to answer; its error is on the terminal."""


class LineProcess:
    """``python -m module arguments`` for the length of a ``with`` block, or until ``close``."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Start it."""
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **command: Any) -> Any:
        """Send a command and return its answer.

        Raises:
            LineProcessError: It ended instead.
        """
        assert self._process.stdin is not None  # noqa: S101 - they are pipes
        assert self._process.stdout is not None  # noqa: S101
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise LineProcessError(f"{self._module} ended; its error is above")
        return json.loads(answer)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_error: object) -> None:
        """End it."""
        self.close()


__all__ = ["LineProcess", "LineProcessError"]
