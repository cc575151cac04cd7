"""What jobs have on disk: requests, which may be hundreds of megabytes, and results.

The database says what is whole: a request lies on disk, synced, before its job is in the database, and a
result before its job is ``COMPLETED``. Files without that are half written and go. ``jobs/<id>/request`` and
``jobs/<id>/result.<attempt>`` are a job's; a request that is being received lies in the process's own
folder, which goes with the process. All disk work runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import mmap
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Collection, Iterable
from pathlib import Path
from typing import BinaryIO, Final

from api_schemas.errors import ApiError, ErrorCode
from app.storage.process_folders import ProcessFolder, claim_folder
from app.storage.results import OpenResult
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest

logger = logging.getLogger(__name__)

_REQUEST: Final = "request"
_BUFFER_BYTES: Final = 1024 * 1024
_ORPHAN_S: Final = 3600.0
"""A folder without a job may belong to a server that is about to write the job down; so old, it does not."""


class Space:
    """The bytes that files of jobs may have together.

    What the database knows is counted when it is told of, what is being written as it is written; other
    processes' writes are seen at the next ``set_stored``.
    """

    def __init__(self, max_bytes: int) -> None:
        """Begin with nothing stored."""
        self._max_bytes = max_bytes
        self._stored = 0
        self._written = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes that are about to be written.

        Raises:
            ApiError: ``job_store_full``.
        """
        if self._stored + self._written + num_bytes > self._max_bytes:
            raise ApiError(
                ErrorCode.JOB_STORE_FULL,
                f"The jobs of this server may have {self._max_bytes} bytes together, and have "
                f"{self._stored + self._written}; remove some (DELETE /v1/jobs/{{id}}), or wait until they "
                "expire.",
            )
        self._written += num_bytes

    def give_up(self, num_bytes: int) -> None:
        """Forget bytes that were written and are gone."""
        self._written -= num_bytes

    def keep(self, num_bytes: int) -> None:
        """Count bytes that were written as stored."""
        self._written -= num_bytes
        self._stored += num_bytes

    def free(self, num_bytes: int) -> None:
        """Forget bytes that were stored and are gone."""
        self._stored = max(0, self._stored - num_bytes)

    def set_stored(self, num_bytes: int) -> None:
        """Learn what the database says."""
        self._stored = num_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """A request that was received: where it lies, its size and its SHA-256 in hexadecimal."""

    path: Path
    num_bytes: int
    digest: str


class ResultFile:
    """A result that is being written."""

    def __init__(self, path: Path, space: Space) -> None:
        """Make the file with the first frame."""
        self._path = path
        self._space = space
        self._file: BinaryIO | None = None
        self.num_bytes = 0

    async def write(self, frame: Frame) -> None:
        """Append a frame.

        Raises:
            ApiError: ``job_store_full``.
        """
        head = frame.head()
        num_bytes = len(head) + len(frame.data)
        self._space.take(num_bytes)
        self.num_bytes += num_bytes
        await asyncio.to_thread(self._write, head, frame.data)

    async def finish(self) -> None:
        """Make sure that what was written is on disk, whatever happens."""
        await asyncio.to_thread(self._finish)

    async def discard(self) -> None:
        """Remove it; harmless when repeated."""
        self._space.give_up(self.num_bytes)
        self.num_bytes = 0
        await asyncio.to_thread(self._discard)

    def _write(self, *pieces: bytes | bytearray | memoryview) -> None:
        if self._file is None:
            self._file = self._path.open("wb", buffering=0)
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            while rest:
                rest = rest[self._file.write(rest) :]

    def _finish(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            _sync_folder(self._path.parent)

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
        self._path.unlink(missing_ok=True)


class JobFiles:
    """The folder of all jobs.

    Args:
        directory: The server's folder.
        max_bytes: Most bytes of all jobs.
    """

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        """Remember the limit; the disk is first touched by ``start``."""
        self.space = Space(max_bytes)
        self._directory = directory
        self._own: ProcessFolder | None = None

    async def start(self) -> ProcessFolder:
        """Make this process's folder; it says which processes have died."""
        jobs = self._directory / "jobs"
        await asyncio.to_thread(jobs.mkdir, mode=0o700, parents=True, exist_ok=True)
        self._own = await asyncio.to_thread(claim_folder, self._directory / "servers")
        return self._own

    async def close(self) -> None:
        """Remove this process's folder; harmless when repeated."""
        own, self._own = self._own, None
        if own is not None:
            await asyncio.to_thread(own.release)

    @contextlib.asynccontextmanager
    async def received(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[Upload]:
        """Receive a request's bytes; what nobody has adopted by the end of the block is removed.

        Raises:
            ApiError: ``job_store_full``.
        """
        if self._own is None:
            raise RuntimeError("the files must be started before they are used; call start()")
        path = self._own.path / secrets.token_hex(16)
        taken = 0
        try:
            digest = hashlib.sha256()
            file = await asyncio.to_thread(path.open, "xb", buffering=0)
            with file:
                async for piece in _joined(chunks):
                    self.space.take(len(piece))
                    taken += len(piece)
                    await asyncio.to_thread(_append, file, piece, digest)
                await asyncio.to_thread(os.fsync, file.fileno())
            yield Upload(path, taken, digest.hexdigest())
        finally:
            if await asyncio.to_thread(_remove, path):
                self.space.give_up(taken)

    async def head_of(self, upload: Upload) -> TraceRequest:
        """Read a request that was received.

        Raises:
            DecodeError: It is none.
        """
        return await asyncio.to_thread(_mapped, upload.path)

    async def adopt(self, upload: Upload, job_id: str) -> None:
        """Make a request that was received a job's."""
        await asyncio.to_thread(self._adopt, upload.path, self._folder(job_id))
        self.space.keep(upload.num_bytes)

    async def request(self, job_id: str) -> TraceRequest:
        """Read a job's request; its parts are views of the file, not of memory.

        Raises:
            FileNotFoundError: It is gone.
            DecodeError: It is broken.
        """
        return await asyncio.to_thread(_mapped, self._folder(job_id) / _REQUEST)

    def new_result(self, job_id: str, attempt: int) -> ResultFile:
        """Return a result to be written."""
        return ResultFile(self._result(job_id, attempt), self.space)

    async def result(self, job_id: str, attempt: int) -> OpenResult:
        """Open a result.

        Raises:
            FileNotFoundError: It is gone.
        """
        file = await asyncio.to_thread(self._result(job_id, attempt).open, "rb")
        return OpenResult(file, os.fstat(file.fileno()).st_size)

    async def remove_results(self, attempts: Iterable[tuple[str, int]]) -> None:
        """Remove whatever there is of the results of these attempts at these jobs."""
        await asyncio.to_thread(self._remove_results, list(attempts))

    async def remove(self, ids: Iterable[str]) -> None:
        """Remove all that jobs have."""
        await asyncio.to_thread(self._remove_folders, list(ids))

    async def remove_others(self, known: Collection[str]) -> None:
        """Remove folders of jobs that are not in the database."""
        await asyncio.to_thread(self._remove_orphans, frozenset(known))

    def _folder(self, job_id: str) -> Path:
        return self._directory / "jobs" / job_id

    def _result(self, job_id: str, attempt: int) -> Path:
        return self._folder(job_id) / f"result.{attempt}"

    @staticmethod
    def _adopt(path: Path, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        path.rename(folder / _REQUEST)
        _sync_folder(folder)
        _sync_folder(folder.parent)

    def _remove_results(self, attempts: list[tuple[str, int]]) -> None:
        for job_id, attempt in attempts:
            self._result(job_id, attempt).unlink(missing_ok=True)

    def _remove_folders(self, ids: list[str]) -> None:
        for job_id in ids:
            shutil.rmtree(self._folder(job_id), ignore_errors=True)

    def _remove_orphans(self, known: frozenset[str]) -> None:
        for folder in (self._directory / "jobs").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if folder.name not in known and folder.stat().st_mtime < time.time() - _ORPHAN_S:
                    logger.info("removing files that belong to no job: %s", folder)
                    shutil.rmtree(folder, ignore_errors=True)


async def _joined(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same bytes in pieces of about a megabyte: each one costs a turn of a thread."""
    waiting: list[bytes] = []
    num_bytes = 0
    async for chunk in chunks:
        waiting.append(chunk)
        num_bytes += len(chunk)
        if num_bytes >= _BUFFER_BYTES:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
    yield b"".join(waiting)


def _append(file: BinaryIO, piece: bytes, digest: hashlib._Hash) -> None:
    digest.update(piece)
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]


def _mapped(path: Path) -> TraceRequest:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return TraceRequest.from_bytes(b"")
        # The mapping goes when nothing refers to it any more; the file may be removed meanwhile.
        return TraceRequest.from_bytes(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


def _remove(path: Path) -> bool:
    """Remove a file, and return whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["JobFiles", "ResultFile", "Space", "Upload"]
