"""The room that jobs have on disk: what they may have together, and what is said where it takes no more.

Files of jobs (``job_files``, ``job_results``) are counted here before they are written, and given up or kept
exactly once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from api_schemas.errors import ApiError, ErrorCode

logger = logging.getLogger(__name__)

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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


@contextlib.contextmanager
def on_disk(what: str) -> Iterator[None]:
    """Say what the disk refuses in words for clients, who would otherwise send it again in vain."""
    try:
        yield
    except OSError as error:
        logger.exception("a file of a job could not be written")
        if error.errno in _NO_ROOM:
            code, advice = ErrorCode.JOB_STORE_FULL, "it has to be given room before this is tried again."
        else:
            code, advice = ErrorCode.INTERNAL, "the server has logged it, and its operator must see to it."
        raise ApiError(
            code,
            f"{what} could not be written to the server's disk ({os.strerror(error.errno or 0)}): {advice}",
        ) from error


def sync_folder(folder: Path) -> None:
    """Make sure that the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["Space", "on_disk", "sync_folder"]
