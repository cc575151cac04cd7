"""Where a dataset lies: a folder, or a URL that fsspec opens, for which shards are spooled in a folder first.

A file appears under its name when all of its bytes are on the disk. Errors of the system and of fsspec's
filesystems become ``SinkError`` here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import filelock
import fsspec
import msgspec
import platformdirs

from nnsight_engine.datasets.manifest import (
    DatasetBusyError,
    SinkError,
    SinkFullError,
    SinkRefusedError,
)

Result = TypeVar("Result")

INDEX: Final = "index.parquet"
PARTIAL: Final = ".partial"
_LOCK: Final = ".writer.lock"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED: Final = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError)


def shard_name(number: int) -> str:
    return f"shards/{number:05d}"


class Retries(msgspec.Struct, frozen=True):
    """How often a remote place is asked, with pauses that double from the first to the longest."""

    attempts: int = 8
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0


def sink_error(error: Exception, place: str) -> SinkError:
    if isinstance(error, SinkError):
        return error
    kind: type[SinkError] = SinkError
    if isinstance(error, OSError) and error.errno in _FULL:
        kind = SinkFullError
    elif isinstance(error, _REFUSED):
        kind = SinkRefusedError
    return kind(f"{place} did not take a file: {type(error).__name__}: {error}")


@contextlib.contextmanager
def writing(place: str) -> Iterator[None]:
    """Raise errors of the system as SinkError."""
    try:
        yield
    except OSError as error:
        raise sink_error(error, place) from error


def sync_folder(folder: Path) -> None:
    """Make the names of files in a folder durable, which syncing the files does not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


class Storage(ABC):
    """``folder`` is where shards are written; the place itself, or the spool."""

    place: str
    folder: Path
    _lock: filelock.BaseFileLock

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return a file; None if there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def publish(self, shard: int) -> None:
        """Bring a shard that is complete in ``folder`` to its place, its index last."""

    def lock(self) -> None:
        """Keep other processes of this machine from writing the dataset; DatasetBusyError if one does."""
        with writing(self.place):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(self.folder / _LOCK)
            try:
                self._lock.acquire(timeout=0)
            except filelock.Timeout as error:
                raise DatasetBusyError(f"another process writes the dataset at {self.place}") from error

    def new_shard(self, number: int) -> Path:
        """Return the empty folder of a shard, without what an earlier run left."""
        folder = self.folder / shard_name(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def close(self) -> None:
        with contextlib.suppress(OSError):
            Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()


class LocalStorage(Storage):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = str(folder)

    def read(self, name: str) -> bytes | None:
        path = self.folder / name
        with writing(self.place):
            return path.read_bytes() if path.is_file() else None

    def write(self, name: str, data: bytes) -> None:
        with writing(self.place):
            write_durably(self.folder / name, data)

    def publish(self, shard: int) -> None:
        with writing(self.place):
            sync_folder((self.folder / shard_name(shard)).parent)
            sync_folder(self.folder)


class RemoteStorage(Storage):
    """Holds one shard in the spool at a time."""

    def __init__(self, filesystem: Any, path: str, place: str, spool: Path | None, retries: Retries) -> None:
        """Choose the spool by a hash of the place; setting ``stopped`` ends the pauses between retries."""
        digest = hashlib.sha256(place.encode()).hexdigest()[:16]
        spools = Path(spool) if spool else Path(platformdirs.user_cache_dir("nnsight-engine")) / "spool"
        self.folder = spools / digest
        self.place = place
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self._retries = retries
        self.stopped = threading.Event()

    def read(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            try:
                data: bytes = self._filesystem.cat_file(f"{self._path}/{name}")
            except FileNotFoundError:
                return None
            return data

        return self._retried(read)

    def write(self, name: str, data: bytes) -> None:
        self._retried(lambda: self._filesystem.pipe_file(f"{self._path}/{name}", data))

    def publish(self, shard: int) -> None:
        """Upload a shard from the spool, the index last, as it says that the shard is complete."""
        folder = self.folder / shard_name(shard)
        files = sorted(path for path in folder.iterdir() if path.name != INDEX)
        for path in [*files, folder / INDEX]:
            target = f"{self._path}/{shard_name(shard)}/{path.name}"
            self._retried(functools.partial(self._upload, path, target))
        shutil.rmtree(folder)

    def _upload(self, path: Path, target: str) -> None:
        self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._filesystem.put_file(str(path), target)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)

    def _retried(self, call: Callable[[], Result]) -> Result:
        """Return what ``call`` does, after retries; a full or a refusing place is not asked again."""
        pause = self._retries.first_pause_s
        for attempt in range(1, self._retries.attempts + 1):
            try:
                return call()
            except Exception as error:  # a filesystem's client has errors of its own
                failure = sink_error(error, self.place)
                is_final = isinstance(failure, SinkFullError | SinkRefusedError)
                if is_final or attempt == self._retries.attempts or self.stopped.wait(pause):
                    raise failure from error
                pause = min(2 * pause, self._retries.max_pause_s)
        raise AssertionError


def open_storage(
    to: str | os.PathLike[str], *, spool: Path | None = None, retries: Retries | None = None
) -> Storage:
    """Return the storage of a path or of an fsspec URL; SinkRefusedError if nothing opens the URL."""
    place = os.fspath(to)
    if "://" not in place:
        return LocalStorage(Path(place).expanduser().absolute())
    try:
        filesystem, path = fsspec.core.url_to_fs(place)
    except (ImportError, ValueError) as error:
        raise SinkRefusedError(f"no filesystem opens {place}: {error}") from error
    if place.startswith(("file://", "local://")):
        return LocalStorage(Path(path))
    return RemoteStorage(filesystem, path, place, spool, retries or Retries())
