"""Writes a job's result, from threads: complete and synced before the database refers to it, or discarded."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import BinaryIO

from api_schemas.errors import ErrorCode
from app.storage.disk_quota import DiskQuota, on_disk, sync_folder
from app.storage.storage_usage import Holder
from nnsight_engine.remote_backend.frames import Frame

logger = logging.getLogger(__name__)


class ResultFile:
    """A result that is being written, and counted as such until ``keep``, ``leave`` or ``discard``.

    A thread may still write after its caller was cancelled, so a lock serializes the threads, and nothing is
    written after ``discard``.
    """

    def __init__(self, path: Path, space: DiskQuota, holder: Holder) -> None:
        self._path = path
        self._space = space
        self._holder = holder
        self._file: BinaryIO | None = None
        self._turn = threading.Lock()
        self._is_discarded = False
        self.num_bytes = 0

    async def write(self, frame: Frame) -> None:
        """Append a frame; ``job_store_full``, ``stored_bytes_full``, ``internal_error`` for a failed disk."""
        head = frame.head()
        num_bytes = len(head) + len(frame.data)
        self._space.take(num_bytes, self._holder)
        self.num_bytes += num_bytes
        with on_disk("The job's result", ErrorCode.JOB_STORE_FULL):
            await asyncio.to_thread(self._write, head, frame.data)

    async def finish(self) -> None:
        """Sync the written frames and the folder to disk, and close the file; raises as ``write`` does."""
        with on_disk("The job's result", ErrorCode.JOB_STORE_FULL):
            await asyncio.to_thread(self._finish)

    def keep(self) -> None:
        """Count the bytes as stored, once the database records the result as complete."""
        self._space.keep(self.num_bytes, self._holder)
        self.num_bytes = 0

    def leave(self) -> None:
        """Leave the file to the cleanup, which consults the database; no effect after ``keep``."""
        self._space.give_up(self.num_bytes, self._holder)
        self.num_bytes = 0

    async def discard(self) -> None:
        self._space.give_up(self.num_bytes, self._holder)
        self.num_bytes = 0
        await asyncio.to_thread(self._discard)

    def _write(self, *pieces: bytes | bytearray | memoryview) -> None:
        with self._turn:
            if self._is_discarded:
                return
            if self._file is None:
                self._file = self._path.open("wb", buffering=0)
            for piece in pieces:
                rest = memoryview(piece).cast("B")
                while rest:
                    rest = rest[self._file.write(rest) :]

    def _finish(self) -> None:
        with self._turn:
            if self._file is not None and not self._is_discarded:
                os.fsync(self._file.fileno())
                self._file.close()
                sync_folder(self._path.parent)

    def _discard(self) -> None:
        with self._turn:
            self._is_discarded = True
            try:
                if self._file is not None:
                    self._file.close()
                self._path.unlink(missing_ok=True)
            except OSError:
                # The file is never served without a reference in the database; it is removed with its job.
                logger.warning("an incomplete result could not be removed: %s", self._path, exc_info=True)


__all__ = ["ResultFile"]
