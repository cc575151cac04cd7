"""The disk quota of one kind of files: bytes are reserved before they are written."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from app.allowance import Allowance
from app.storage.storage_usage import NO_HOLDER, Holder, StoredBytes

logger = logging.getLogger(__name__)

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskQuota:
    """Counts bytes when they are written and when the database records them.

    Writes of other processes are included at the next ``set_stored``; ``limits`` apply over all stores.
    """

    def __init__(self, allowance: Allowance, limits: StoredBytes | None = None) -> None:
        self._allowance = allowance
        self._limits = limits or StoredBytes()
        self._stored, self._written = self._limits.place(), self._limits.place()
        self._held = self._limits.place()

    @property
    def used_bytes(self) -> int:
        return self._total(None)

    def take(self, num_bytes: int, holder: Holder = NO_HOLDER) -> None:
        """Reserve bytes that are about to be written; the allowance's error, or ``stored_bytes_full``.

        Then exactly one of ``give_up`` and ``keep`` follows.
        """
        self._allowance.check_total(self._total(None), num_bytes)
        self._allowance.check(holder.tenant, self._total(f"tenant:{holder.tenant}"), num_bytes)
        self._limits.check(holder, num_bytes)
        self._written.add(holder, num_bytes)

    def _total(self, name: str | None) -> int:
        places = (self._stored, self._written, self._held)
        return sum(place.total if name is None else place.of(name) for place in places)

    def give_up(self, num_bytes: int, holder: Holder = NO_HOLDER) -> None:
        """Release reserved bytes whose file was removed."""
        self._written.add(holder, -num_bytes)

    def keep(self, num_bytes: int, holder: Holder = NO_HOLDER) -> None:
        self._written.add(holder, -num_bytes)
        self._stored.add(holder, num_bytes)

    def add(self, num_bytes: int, holder: Holder = NO_HOLDER) -> None:
        self._stored.add(holder, num_bytes)

    def free(self, num_bytes: int, holder: Holder = NO_HOLDER) -> None:
        self._stored.add(holder, -num_bytes)

    def hold(self, num_bytes: int, holder: Holder = NO_HOLDER) -> None:
        """Count bytes of removed files that still have readers; negative to release them."""
        self._held.add(holder, num_bytes)

    def set_stored(self, counts: Mapping[Holder, int]) -> None:
        self._stored.set(counts)


@contextlib.contextmanager
def on_disk(what: str, full: ErrorCode) -> Iterator[None]:
    """Convert OSError to ApiError, so that clients do not retry in vain; ``full``: a full disk's code."""
    try:
        yield
    except OSError as error:
        logger.exception("a file could not be written")
        if error.errno in _NO_ROOM:
            code, advice = full, "it has to be given room before this is tried again."
        else:
            code, advice = ErrorCode.INTERNAL, "the server has logged it, and its operator must see to it."
        raise ApiError(
            code,
            f"{what} could not be written to the server's disk ({os.strerror(error.errno or 0)}): {advice}",
        ) from error


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = ["DiskQuota", "on_disk", "sync_folder"]
