"""A folder for each process that lives, locked for as long as it does, so that what the dead left is known.

The lock goes with the process, however that ends. A folder without a holder is a dead process's and is
removed by the next that claims one. Stores of files call this from threads.
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
"""A socket's path has 107 characters, of which ours take 50 and vLLM's name of one 36."""
LOCK_NAME: Final = ".lock"
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - in it a folder of ours, which is looked at


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessFolder:
    """A folder of this process.

    Attributes:
        path: Where it is; its name is no other process's, ever.
        lock: The descriptor that holds its lock.
        dead: Names of the folders of dead processes that were removed.
    """

    path: Path
    lock: int
    dead: frozenset[str]

    def release(self) -> None:
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def claim_folder(directory: Path) -> ProcessFolder:
    """Make and lock a folder, and remove those whose lock nobody holds."""
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
    """Make and lock a folder on the file system in memory; None where there is none for this user alone."""
    return _claim_private(_MEMORY / f"nnsight-engine-{os.getuid()}", "large results go over sockets")


def claim_socket_folder() -> ProcessFolder | None:
    """Make and lock a folder for sockets with names, whose paths are short; None where there can be none."""
    temporary = Path(tempfile.gettempdir())
    if len(str(temporary)) > _MAX_TEMPORARY_CHARS:
        return None
    return _claim_private(temporary / f"nnsight-engine-{os.getuid()}", "the engine's sockets stay behind")


def _claim_private(directory: Path, otherwise: str) -> ProcessFolder | None:
    """Claim a folder in a directory of this user's alone, in a place that is everybody's."""
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
        # Only folders of ours carry the lock; whatever else lies here is not ours to remove.
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
