"""Stored bytes by tenant and key, over all stores, and the disk quota of one kind of files.

Bytes are reserved before they are written. Limits are updated with each request, so that no store has to
query a database.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from api_schemas.errors import ApiError, ErrorCode
from app.limits.allowances import Allowance, limit_message

_MAKE_ROOM: Final = (
    "remove jobs (GET /v1/jobs lists them, DELETE /v1/jobs/{id}), vectors, detectors, dictionaries or "
    "presets (likewise /v1/vectors, /v1/detectors, /v1/dictionaries, /v1/presets), or wait until jobs and "
    "results expire"
)


class Holder(NamedTuple):
    """The owner of stored data, empty without keys; ``key_id`` is empty if unknown."""

    tenant: str = ""
    key_id: str = ""

    @property
    def names(self) -> list[str]:
        """The names under which the bytes are counted and whose limits apply."""
        named = (("tenant", self.tenant), ("key", self.key_id))
        return [f"{kind}:{name}" for kind, name in named if name]


NO_HOLDER: Final = Holder()


class StorageUsage:
    def __init__(self) -> None:
        self.total = 0
        self._by_name: collections.Counter[str] = collections.Counter()

    def of(self, name: str) -> int:
        return self._by_name[name]

    def add(self, holder: Holder, num_bytes: int) -> None:
        """Count added bytes or, if negative, removed ones."""
        self.total = max(0, self.total + num_bytes)
        for name in holder.names:
            self._by_name[name] += num_bytes
            if self._by_name[name] <= 0:
                del self._by_name[name]

    def set(self, counts: Mapping[Holder, int]) -> None:
        self.total = 0
        self._by_name.clear()
        for holder, num_bytes in counts.items():
            self.add(holder, num_bytes)


class StoredBytes:
    def __init__(self) -> None:
        self._places: list[StorageUsage] = []
        self._limits: dict[str, int] = {}

    def place(self) -> StorageUsage:
        kept = StorageUsage()
        self._places.append(kept)
        return kept

    def set_limits(self, name: str, most: int | None) -> None:
        """Set the limit of one of ``Holder.names``; None for no limit."""
        if most is not None:
            self._limits[name] = most
        else:
            self._limits.pop(name, None)

    def used(self, name: str) -> int:
        return sum(place.of(name) for place in self._places)

    def excess(self, name: str, num_bytes: int) -> int:
        most = self._limits.get(name)
        return 0 if most is None else max(0, self.used(name) + num_bytes - most)

    def check(self, holder: Holder, num_bytes: int) -> None:
        """Raise ``stored_bytes_full`` unless a holder may store ``num_bytes`` more."""
        for name in holder.names:
            if self.excess(name, num_bytes):
                raise self.full(name, num_bytes)

    def full(self, name: str, num_bytes: int) -> ApiError:
        kind, _, who = name.partition(":")
        return ApiError(
            ErrorCode.STORED_BYTES_FULL,
            limit_message(
                f"The {kind} {who!r}",
                self._limits.get(name, 0),
                "stored bytes",
                self.used(name),
                num_bytes,
                _MAKE_ROOM,
            ),
        )


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
