"""Large results on their way from a worker to the server: as files in memory, where both are on one machine.

vLLM's own way copies them from process to process several times, at about 300 MB a second. A worker writes
the file, the server maps it and removes its name; its memory goes with the last who reads. A worker that
cannot write there (of another machine, or out of room) answers with the bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

LARGE_BYTES: Final = 2**20
"""What is worth a file."""


class SharedMemoryResults:
    """The server's side.

    Args:
        folder: Where the files are, on a file system in memory; nobody else's.
    """

    def __init__(self, folder: Path) -> None:
        """Keep the folder, which is there already."""
        self._folder = folder

    def path(self, key: str) -> str:
        """Return where a worker leaves the result of a trace, if it is large."""
        return str(self._folder / hashlib.sha256(key.encode()).hexdigest())

    def take(self, key: str) -> memoryview:
        """Return what a worker has left, as memory of the reader's own; its file is gone then."""
        path = self.path(key)
        with open(path, "rb") as file:
            os.unlink(path)
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def forget(self, key: str) -> None:
        """Remove what a worker may have left and nobody takes."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(key))


def leave(pieces: Sequence[bytes | memoryview], path: str) -> bool:
    """Write a result for the server, which takes it; whether it is worth that, and it was possible."""
    num_bytes = sum(map(len, pieces))
    if num_bytes < LARGE_BYTES:
        return False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return False  # another machine than the server's
    try:
        with open(descriptor, "wb") as file:
            # Memory that is not there would end the process that touches it, later.
            os.posix_fallocate(descriptor, 0, num_bytes)
            file.writelines(pieces)
    except OSError as error:
        logger.warning("a result of %d bytes goes to the server over a socket: %s", num_bytes, error)
        os.unlink(path)
        return False
    return True
