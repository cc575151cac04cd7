"""The room that jobs have on disk: what they may have together, and what is said where it takes no more.

Files of jobs (``job_files``, ``job_results``) and what they print (``job_prints``) are counted here before
they are written, and given up or kept exactly once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from app.storage.storage_usage import NOBODY, Holder, StoredBytes

logger = logging.getLogger(__name__)

JOB_BYTES: Final = 8 * 1024
"""What a job takes beside its files and events, however small it is: a folder, blocks of the disk, rows."""

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class JobStorageQuota:
    """The bytes that files of jobs may have together.

    What the database knows is counted when it is told of, what is being written as it is written; other
    processes' writes are seen at the next ``set_stored``.

    Args:
        max_bytes: Most bytes of all jobs.
        share: The part of that which one tenant may have.
        limits: What tenants and keys may keep in all places together.
    """

    def __init__(self, max_bytes: int, *, share: float = 1.0, limits: StoredBytes | None = None) -> None:
        """Begin with nothing stored."""
        self._max_bytes = max_bytes
        self._max_tenant_bytes = int(max_bytes * share)
        self._limits = limits or StoredBytes()
        self._stored, self._written = self._limits.place(), self._limits.place()
        self._held = self._limits.place()

    @property
    def used_bytes(self) -> int:
        """How many there are."""
        return self._total(None)

    def take(self, num_bytes: int, holder: Holder = NOBODY) -> None:
        """Count bytes that are about to be written.

        Raises:
            ApiError: ``job_store_full``, ``stored_bytes_full``.
        """
        self._check("The jobs of this server", self._max_bytes, self._total(None), num_bytes)
        if holder.tenant:
            whose = f"The jobs of the tenant {holder.tenant!r}"
            self._check(whose, self._max_tenant_bytes, self._total(f"tenant:{holder.tenant}"), num_bytes)
        self._limits.check(holder, num_bytes)
        self._written.add(holder, num_bytes)

    def _total(self, name: str | None) -> int:
        places = (self._stored, self._written, self._held)
        return sum(place.total if name is None else place.of(name) for place in places)

    @staticmethod
    def _check(whose: str, most: int, used: int, num_bytes: int) -> None:
        if used + num_bytes > most:
            raise ApiError(
                ErrorCode.JOB_STORE_FULL,
                f"{whose} may have {most} bytes together, and have {used}; remove some "
                "(DELETE /v1/jobs/{id}), or wait until they expire.",
            )

    def give_up(self, num_bytes: int, holder: Holder = NOBODY) -> None:
        """Forget bytes that were written and are gone."""
        self._written.add(holder, -num_bytes)

    def keep(self, num_bytes: int, holder: Holder = NOBODY) -> None:
        """Count bytes that were written as stored."""
        self._written.add(holder, -num_bytes)
        self._stored.add(holder, num_bytes)

    def add(self, num_bytes: int, holder: Holder = NOBODY) -> None:
        """Count bytes as stored that have to be, whether or not there is room."""
        self._stored.add(holder, num_bytes)

    def free(self, num_bytes: int, holder: Holder = NOBODY) -> None:
        """Forget bytes that were stored and are gone."""
        self._stored.add(holder, -num_bytes)

    def hold(self, num_bytes: int, holder: Holder = NOBODY) -> None:
        """Count bytes that no job has any more and that are still there; less than none when they go."""
        self._held.add(holder, num_bytes)

    def set_stored(self, counts: Mapping[Holder, int]) -> None:
        """Learn what the database says."""
        self._stored.set(counts)


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


__all__ = ["JOB_BYTES", "JobStorageQuota", "on_disk", "sync_folder"]
