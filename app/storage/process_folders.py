"""Folders of one process each, locked during its lifetime, so that leftovers can be identified.

The kernel releases the lock when the process ends; the next claim of a folder removes those of dead ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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


def claim_folder(directory: Path) -> ProcessFolder:
    """Create and lock a folder, and remove folders whose lock is free."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    dead = set()
    with _locked(directory / LOCK_NAME):
        for other in directory.iterdir():
            if other.is_dir() and _is_abandoned(other):
                logger.info("removing files of a dead process: %s", other)
                shutil.rmtree(other, ignore_errors=True)
                dead.add(other.name)
        folder = directory / f"{os.getpid()}-{secrets.token_hex(8)}"
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
    """Claim a folder in a directory private to this user, below a directory shared by all users."""
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
