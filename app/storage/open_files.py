"""Tracks readers of stored files: a removed file occupies disk space until its last reader has closed it.

Its bytes stay counted until then, and readers per tenant are limited: opening files without reading them
does not get around the quotas.

Folders of one process each, locked during its lifetime, so that leftovers can be identified.

The kernel releases the lock when the process ends; the next claim of a folder removes those of dead ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from api_schemas.errors import ErrorCode
from app.limits.limit import UNBOUNDED, Holder, Limit, Spending

_CHUNK_BYTES: Final = 1024 * 1024
_MAX_DOWNLOADS: Final = 64
"""The most of one tenant."""
Key = tuple[str, int]
"""A store's key for a file: an id, and a number among the files of that id."""


@dataclasses.dataclass(slots=True, eq=False)
class OpenFile:
    """One reader of a file of ``holder``; ``close`` unregisters it and is idempotent."""

    key: Key
    spending: Spending
    num_bytes: int
    close: Callable[[], None]

    @property
    def holder(self) -> Holder:
        return self.spending.holder


class OpenFiles:
    def __init__(self) -> None:
        self._readers: dict[Key, list[OpenFile]] = {}
        self._limit = Limit(
            "downloads under way", UNBOUNDED, each=_MAX_DOWNLOADS, code=ErrorCode.RATE_LIMITED,
            then="end some, or wait until they have ended",
        )  # fmt: skip
        self._then: dict[Key, list[Callable[[], None]]] = {}

    def register(self, key: Key, holder: Holder, num_bytes: int) -> OpenFile:
        """Register a reader before its file is opened; ``rate_limit_exceeded`` if the tenant has too many."""
        reading = OpenFile(key, self._limit.spend(holder, 1), num_bytes, lambda: self._unregister(reading))
        self._readers.setdefault(key, []).append(reading)
        return reading

    def is_open(self, key: Key) -> bool:
        return key in self._readers

    def keep_counted(self, space: Limit, id_: str, number: int | None = None) -> None:
        """Count the bytes of an id's removed files, or of one, until their last readers have closed them."""
        for (file_id, file_number), (reading, *_) in list(self._readers.items()):
            if file_id == id_ and number in {None, file_number}:
                spending = space.spend(reading.holder)
                spending.add(reading.num_bytes, may_exceed=True)
                self.when_closed(reading.key, spending.close)

    def when_closed(self, key: Key, then: Callable[[], None]) -> None:
        """Call ``then`` when no reader of the file is left; immediately if there is none."""
        if self.is_open(key):
            self._then.setdefault(key, []).append(then)
        else:
            then()

    def _unregister(self, reading: OpenFile) -> None:
        """Forget a reader, once; after the last one of its file, call what waits for that."""
        readers = self._readers.get(reading.key, [])
        if reading not in readers:
            return
        readers.remove(reading)
        reading.spending.close()
        if not readers:
            del self._readers[reading.key]
            for then in self._then.pop(reading.key, []):
                then()


class OpenResult:
    """A stored file open for reading; its content stays readable to the end even if the file is removed."""

    def __init__(self, file: BinaryIO, reading: OpenFile) -> None:
        """Take ownership of both; ``close`` or the end of ``chunks`` releases them."""
        self._file = file
        self._reading = reading
        self.num_bytes = reading.num_bytes

    async def chunks(self, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from ``start`` to ``stop``, and close the file at the end or when left early."""
        num_left = (self.num_bytes if stop is None else stop) - start
        try:
            self._file.seek(start)
            while num_left > 0 and (
                chunk := await asyncio.to_thread(self._file.read, min(num_left, _CHUNK_BYTES))
            ):
                num_left -= len(chunk)
                yield chunk
        finally:
            await self.close()

    async def close(self) -> None:
        # Closing a read-only file flushes nothing, so it needs no thread.
        self._file.close()
        self._reading.close()


_PIECE_BYTES: Final = 1024 * 1024


async def in_pieces(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same bytes in pieces of about 1 MiB, since each piece costs a dispatch to a thread."""
    waiting: list[bytes] = []
    num_bytes = 0
    async for chunk in chunks:
        waiting.append(chunk)
        num_bytes += len(chunk)
        if num_bytes >= _PIECE_BYTES:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
    yield b"".join(waiting)


def append(file: BinaryIO, piece: bytes | memoryview, digest: hashlib._Hash) -> None:
    """Write all of a piece, however much the disk takes at once, and add it to the digest."""
    digest.update(piece)
    unwritten = memoryview(piece)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


logger = logging.getLogger(__name__)

_MAX_TEMPORARY_CHARS: Final = 20
"""A socket's path may have 107 characters, of which our folders take 50 and vLLM's file name 36."""
LOCK_NAME: Final = ".lock"
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - only a private folder in it is used, and checked


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessFolder:
    """A folder with a name that no other process ever has; ``dead`` names the removed ones."""

    path: Path
    lock: int
    dead: frozenset[str]

    def release(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def new_folder_name() -> str:
    """Return a name that no other process ever has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def claim_folder(directory: Path, name: str | None = None) -> ProcessFolder:
    """Create and lock a folder, and remove folders whose lock is free; ``name``: of ``new_folder_name``."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    dead = set()
    with _locked(directory / LOCK_NAME):
        for existing in directory.iterdir():
            if existing.is_dir() and _is_abandoned(existing):
                logger.info("removing files of a dead process: %s", existing)
                shutil.rmtree(existing, ignore_errors=True)
                dead.add(existing.name)
        folder = directory / (name or new_folder_name())
        folder.mkdir(mode=0o700)
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return ProcessFolder(folder, lock, frozenset(dead))


def claim_memory_folder() -> ProcessFolder | None:
    """Create and lock a folder in the memory file system; None if there is none private to this user."""
    return _claim_private(_MEMORY / f"nnsight-engine-{os.getuid()}", "large results go over sockets")


def claim_socket_folder() -> ProcessFolder | None:
    """Create and lock a folder with a short path for Unix sockets; None if that is not possible."""
    temporary = Path(tempfile.gettempdir())
    if len(str(temporary)) > _MAX_TEMPORARY_CHARS:
        return None
    return _claim_private(temporary / f"nnsight-engine-{os.getuid()}", "the engine's sockets are not removed")


def _claim_private(directory: Path, otherwise: str) -> ProcessFolder | None:
    """Claim a folder in a directory private to this user, below a directory shared by all users.

    None, logged with what follows from it (``otherwise``), if that is not possible.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            logger.warning("%s is not this user's alone: %s", directory, otherwise)
            return None
        return claim_folder(directory)
    except OSError as error:
        logger.info("%s: %s", otherwise, error)
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_abandoned(folder: Path) -> bool:
    """Return whether the process of a folder has ended, since its lock is free."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Only folders of this project contain the lock file; other folders must not be removed.
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
