"""Transfer of large results from a worker to the server, as files in memory if both are on one machine.

vLLM's RPC copies at about 300 MB per second; it is used if the file cannot be written for any reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

PENDING: Final = "pending"
"""Result of a worker whose task is not done; the worker continues with other requests meanwhile."""

T = TypeVar("T")


def common_result(answers: Sequence[T]) -> T:
    """Return the workers' common result: all are equal, or only one worker returned a value."""
    return next((result for result in answers if result), answers[0])


logger = logging.getLogger(__name__)

LARGE_BYTES: Final = 2**20
"""Minimum size of results that are transferred as a file."""


class SharedMemoryResults:
    """The server's side of the transfer; no other server uses ``folder``, on a file system in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: str) -> str:
        return str(self._folder / hashlib.sha256(key.encode()).hexdigest())

    def take_file(self, key: str) -> memoryview:
        """Return the file that a worker has written, as copy-on-write memory, and unlink it."""
        path = self.path(key)
        with open(path, "rb") as file:
            os.unlink(path)
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def forget(self, key: str) -> None:
        """Remove the file that a worker may have written, if it is not going to be read."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(key))


def write_shared(pieces: Sequence[bytes | memoryview], path: str) -> bool:
    """Write results to a file for the server; return whether they are large enough and it succeeded."""
    num_bytes = sum(map(len, pieces))
    if num_bytes < LARGE_BYTES:
        return False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return False  # this worker is on another machine than the server
    except OSError as error:
        _log_failure(num_bytes, error)
        return False
    try:
        with open(descriptor, "wb") as file:
            # If memory ran out later, the process that touches it would be killed.
            os.posix_fallocate(descriptor, 0, num_bytes)
            file.writelines(pieces)
    except OSError as error:
        _log_failure(num_bytes, error)
        with contextlib.suppress(OSError):  # the server may have removed it
            os.unlink(path)
        return False
    return True


def _log_failure(num_bytes: int, error: OSError) -> None:
    logger.warning(
        "a result of %d bytes is sent to the server over a socket instead of shared memory: %s",
        num_bytes,
        error,
    )
