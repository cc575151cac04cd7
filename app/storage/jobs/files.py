"""The files of jobs: ``jobs/<id>/request``, up to hundreds of megabytes, and ``jobs/<id>/result.<attempt>``.

The database is the authority on which files are complete: a request is on disk and synced before its job is
in the database, a result before its job is ``COMPLETED``. Other files are partial and are removed. A request
that is being received is in the process's own folder. All disk access runs in threads.
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
import threading
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import BinaryIO, Final

from api_schemas.errors import ErrorCode
from app.limits.limit import Holder, Spending
from app.storage.jobs.store import NewJob
from app.storage.open_files import (
    OpenFiles,
    OpenResult,
    ProcessFolder,
    append,
    claim_folder,
    in_pieces,
    new_folder_name,
)
from app.storage.quotas import StoredBytes, on_disk, sync_folder
from app.storage.tables import JOB_BYTES, JobRow
from nnsight_engine.remote_backend.frames import Frame
from nnsight_engine.remote_backend.messages import TraceRequest

logger = logging.getLogger(__name__)


class ResultFile:
    """A result that is being written, and counted as such until ``keep``, ``leave`` or ``discard``.

    A thread may still write after its caller was cancelled, so a lock serializes the threads, and nothing is
    written after ``discard``.
    """

    def __init__(self, path: Path, space: StoredBytes, holder: Holder) -> None:
        self._path = path
        self._space = space
        self._spending = space.spend(holder)
        self._file: BinaryIO | None = None
        self._file_lock = threading.Lock()
        self._is_discarded = False

    @property
    def num_bytes(self) -> int:
        return self._spending.amount

    async def write(self, frame: Frame) -> None:
        """Append a frame; ``job_store_full``, ``stored_bytes_full``, ``internal_error`` for a failed disk."""
        head = frame.head()
        self._spending.add(len(head) + len(frame.data))
        with on_disk("The job's result", ErrorCode.JOB_STORE_FULL):
            await asyncio.to_thread(self._write, head, frame.data)

    async def finish(self) -> None:
        """Sync the written frames and the folder to disk, and close the file; raises as ``write`` does."""
        with on_disk("The job's result", ErrorCode.JOB_STORE_FULL):
            await asyncio.to_thread(self._finish)

    def keep(self) -> None:
        """Count the bytes as stored, once the database records the result as complete."""
        self._space.keep(self._spending)

    def leave(self) -> None:
        """Leave the file to the cleanup, which consults the database; no effect after ``keep``."""
        self._spending.close()

    async def discard(self) -> None:
        self._spending.close()
        await asyncio.to_thread(self._discard)

    def _write(self, *pieces: bytes | bytearray | memoryview) -> None:
        """Append the pieces, in a thread; does nothing after ``discard``."""
        with self._file_lock:
            if self._is_discarded:
                return
            if self._file is None:
                self._file = self._path.open("wb", buffering=0)
            for piece in pieces:
                unwritten = memoryview(piece).cast("B")
                while unwritten:
                    unwritten = unwritten[self._file.write(unwritten) :]

    def _finish(self) -> None:
        with self._file_lock:
            if self._file is not None and not self._is_discarded:
                os.fsync(self._file.fileno())
                self._file.close()
                sync_folder(self._path.parent)

    def _discard(self) -> None:
        with self._file_lock:
            self._is_discarded = True
            try:
                if self._file is not None:
                    self._file.close()
                self._path.unlink(missing_ok=True)
            except OSError:
                # The file is never served without a reference in the database; it is removed with its job.
                logger.warning("an incomplete result could not be removed: %s", self._path, exc_info=True)


_REQUEST: Final = "request"
_A_REQUEST: Final = "The request"
ORPHAN_S: Final = 3600.0
"""The age from which a folder without a job is removed; a younger one may belong to a server that is about to
insert the job.
"""


@dataclasses.dataclass(slots=True)
class JobUpload:
    """A received request, at ``path`` until it is adopted by a job and counted as stored."""

    path: Path
    spending: Spending
    num_bytes: int = 0
    digest: str = ""
    is_adopted: bool = False


class JobFiles:
    """``process`` is the name of this process, unique for ever, and of its folder."""

    def __init__(self, directory: Path, space: StoredBytes) -> None:
        self.space = space
        self.process = new_folder_name()
        self._directory = directory
        self._process_folder: ProcessFolder | None = None
        self._open_files = OpenFiles()

    async def start(self) -> frozenset[str]:
        """Create this process's folder, and return the names of the processes that have died."""
        jobs = self._directory / "jobs"
        await asyncio.to_thread(jobs.mkdir, mode=0o700, parents=True, exist_ok=True)
        self._process_folder = await asyncio.to_thread(
            claim_folder, self._directory / "servers", self.process
        )
        return self._process_folder.dead

    async def close(self) -> None:
        folder, self._process_folder = self._process_folder, None
        if folder is not None:
            await asyncio.to_thread(folder.release)

    @contextlib.asynccontextmanager
    async def received(self, chunks: AsyncIterator[bytes], holder: Holder) -> AsyncIterator[JobUpload]:
        """Receive a request's bytes; the file is removed at the end unless it was adopted.

        The errors are ``job_store_full``, ``stored_bytes_full``, or ``internal_error`` for a failed disk.
        """
        if self._process_folder is None:
            raise RuntimeError("the files must be started before they are used; call start()")
        path = self._process_folder.path / secrets.token_hex(16)
        upload = JobUpload(path, self.space.spend(holder, JOB_BYTES))
        try:
            digest = hashlib.sha256()
            with on_disk(_A_REQUEST, ErrorCode.JOB_STORE_FULL):
                file = await asyncio.to_thread(path.open, "xb", buffering=0)
            with file:
                async for piece in in_pieces(chunks):
                    upload.spending.add(len(piece))
                    upload.num_bytes += len(piece)
                    with on_disk(_A_REQUEST, ErrorCode.JOB_STORE_FULL):
                        await asyncio.to_thread(append, file, piece, digest)
                with on_disk(_A_REQUEST, ErrorCode.JOB_STORE_FULL):
                    await asyncio.to_thread(os.fsync, file.fileno())
            upload.digest = digest.hexdigest()
            yield upload
        finally:
            if not upload.is_adopted:
                upload.spending.close()
                await asyncio.to_thread(path.unlink, missing_ok=True)

    async def head_of(self, upload: JobUpload) -> TraceRequest:
        return await asyncio.to_thread(_read_mapped, upload.path)

    async def adopt(self, upload: JobUpload, job_id: str) -> None:
        """Move a received request into a job's folder; on failure nothing is left there."""
        folder = self._job_folder(job_id)
        moving = asyncio.ensure_future(asyncio.to_thread(_move, upload.path, folder))
        try:
            with on_disk(_A_REQUEST, ErrorCode.JOB_STORE_FULL):
                await asyncio.shield(moving)
        except asyncio.CancelledError:
            # The thread cannot be cancelled, and no job will be inserted for the moved file.
            await asyncio.gather(moving, return_exceptions=True)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
        upload.is_adopted = True
        self.space.keep(upload.spending)

    async def request(self, job_id: str) -> TraceRequest:
        """Read a job's request, with views of the memory-mapped file; FileNotFoundError, DecodeError."""
        return await asyncio.to_thread(_read_mapped, self._job_folder(job_id) / _REQUEST)

    def new_result(self, job: JobRow) -> ResultFile:
        return ResultFile(self._result_path(job.id, job.attempt), self.space, job.holder)

    async def result(self, job: JobRow) -> OpenResult:
        """Open a result; its bytes stay counted until it is closed, even if its job is removed meanwhile."""
        reading = self._open_files.register((job.id, job.attempt), job.holder, job.result_bytes or 0)
        try:
            path = self._result_path(job.id, job.attempt)
            return OpenResult(await asyncio.to_thread(path.open, "rb"), reading)
        except BaseException:
            reading.close()
            raise

    async def remove_results(self, jobs: Collection[JobRow]) -> None:
        """Remove the result files, if any, of the attempts of jobs."""
        for job in jobs:
            self._open_files.keep_counted(self.space, job.id, job.attempt)
            await asyncio.to_thread(self._result_path(job.id, job.attempt).unlink, missing_ok=True)

    async def remove(self, jobs: Collection[JobRow | NewJob]) -> None:
        """Remove jobs' folders, and uncount their bytes."""
        for job in jobs:
            self._open_files.keep_counted(self.space, job.id)
            await asyncio.to_thread(shutil.rmtree, self._job_folder(job.id), ignore_errors=True)
            self.space.store(-job.num_bytes, job.holder)

    async def remove_orphans(self, known: Collection[str]) -> None:
        await asyncio.to_thread(self._remove_orphans, frozenset(known))

    def _job_folder(self, job_id: str) -> Path:
        return self._directory / "jobs" / job_id

    def _result_path(self, job_id: str, attempt: int) -> Path:
        return self._job_folder(job_id) / f"result.{attempt}"

    def _remove_orphans(self, known: frozenset[str]) -> None:
        for folder in (self._directory / "jobs").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if folder.name not in known and folder.stat().st_mtime < time.time() - ORPHAN_S:
                    logger.info("removing files that belong to no job: %s", folder)
                    shutil.rmtree(folder, ignore_errors=True)


def _read_mapped(path: Path) -> TraceRequest:
    """Return a request whose parts are views of the file in memory, read as they are used."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return TraceRequest.from_bytes(b"")
        # The mapping is closed with its last reference; the file may be removed meanwhile.
        return TraceRequest.from_bytes(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


def _move(path: Path, folder: Path) -> None:
    """Move a file into a new folder as the job's request, durably; on failure the folder is removed."""
    folder.mkdir(mode=0o700)
    try:
        path.rename(folder / _REQUEST)
        sync_folder(folder)
        sync_folder(folder.parent)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
