"""A cached folder that is expensive to build: built once, and verified on every use.

A model with one wrong byte still produces text, so each file must have the size and SHA-256 of the manifest.
The folder is built beside its target and renamed into place, so that no reader sees a partial one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import filelock
import msgspec

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, float], None]
"""Called with the current stage and its completed fraction, 0.0 to 1.0."""

FolderBuilder = Callable[[Path, ProgressCallback], None]
"""Writes the folder's files into an empty folder; raises an exception on failure."""

MANIFEST_NAME: Final = "manifest.json"
LOCK_TIMEOUT_S: Final = 900.0


class FolderLockTimeoutError(Exception):
    pass


class FileRecord(msgspec.Struct, frozen=True):
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Every file of the folder except the manifest, by its path relative to the folder."""

    files: dict[str, FileRecord]


def ensure_folder(
    target: Path,
    build: FolderBuilder,
    *,
    progress: ProgressCallback,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Path:
    """Return ``target``, built once, by one process at a time, unless it exists and is intact.

    FolderLockTimeoutError: another process held the lock for ``lock_timeout_s``.
    """
    # Checked without the lock first: the usual case, and the only one that works on a read-only disk.
    if find_fault(target) is None:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock"), progress, lock_timeout_s):
        fault = find_fault(target)
        if fault is None:
            return target
        if target.exists():
            logger.warning("Cached folder %s is not usable (%s); building it again.", target, fault)
        _sweep_leftovers(target)
        _build_and_move(target, build, progress)
    return target


def find_fault(folder: Path) -> str | None:
    """Return what is wrong with the folder, or None if it matches its manifest."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return f"no {MANIFEST_NAME}"
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        return f"unreadable {MANIFEST_NAME}: {error}"
    try:
        present = {_relative(path, folder) for path in _files(folder)}
        if present != set(manifest.files):
            return f"missing or unexpected files: {sorted(present ^ set(manifest.files))}"
        return next(
            (
                f"{name} differs from its checksum"
                for name, record in manifest.files.items()
                if _record(folder / name) != record
            ),
            None,
        )
    except OSError as error:
        return f"unreadable: {error}"


def write_manifest(folder: Path) -> None:
    files = {_relative(path, folder): _record(path) for path in _files(folder)}
    data = msgspec.json.format(msgspec.json.encode(Manifest(files=files)), indent=2)
    (folder / MANIFEST_NAME).write_bytes(data)


@contextlib.contextmanager
def _locked(path: Path, progress: ProgressCallback, timeout_s: float) -> Iterator[None]:
    """Hold a lock between processes; FolderLockTimeoutError if another one keeps it for too long."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        progress("waiting for another process that builds the same folder", 0.0)
        try:
            lock.acquire(timeout=timeout_s)
        except filelock.Timeout as error:
            raise FolderLockTimeoutError(
                f"another process has held {path} for {timeout_s:g} s; "
                "wait for it or end it, then start again"
            ) from error
    try:
        yield
    finally:
        lock.release()


def _build_and_move(target: Path, build: FolderBuilder, progress: ProgressCallback) -> None:
    """Build the folder and its manifest beside ``target``, then rename it into place."""
    staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(target), dir=target.parent))
    try:
        content = staging / "new"
        content.mkdir()
        build(content, progress)
        progress("recording checksums", 0.0)
        write_manifest(content)
        # A folder cannot be renamed onto a non-empty one. Between these two renames the target does not
        # exist, which a process that starts at that moment treats as "not built yet".
        if target.exists():
            os.replace(target, staging / "old")
        os.replace(content, target)
        progress("recording checksums", 1.0)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sweep_leftovers(target: Path) -> None:
    """Remove what killed builders left behind; the caller holds the lock, so none of them is alive."""
    for path in target.parent.glob(f"{_staging_prefix(target)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _staging_prefix(target: Path) -> str:
    return f".{target.name}.build-"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST_NAME)


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(num_bytes=path.stat().st_size, sha256=digest)
