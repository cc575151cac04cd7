"""Stored bytes: of one store, counted by tenant and key, and of a tenant or a key over all stores.

Bytes are reserved before they are written. Quotas are updated with each request, so that no store has to
query a database for them.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from app.limits.limit import UNBOUNDED, Holder, Limit, Spending

logger = logging.getLogger(__name__)

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MAKE_ROOM: Final = (
    "remove jobs (GET /v1/jobs lists them, DELETE /v1/jobs/{id}), vectors, detectors, dictionaries or "
    "presets (likewise /v1/vectors, /v1/detectors, /v1/dictionaries, /v1/presets), or wait until jobs and "
    "results expire"
)


class StoredQuotas(Limit):
    """The quotas of tenants and keys over all ``stores`` of a server."""

    def __init__(self) -> None:
        super().__init__("stored bytes", UNBOUNDED, code=ErrorCode.STORED_BYTES_FULL, then=_MAKE_ROOM)
        self.stores: list[StoredBytes] = []
        self._quotas: dict[str, int] = {}

    def set_quota(self, name: str, most: int | None) -> None:
        """Set the quota of one of ``Holder.names``; None for no limit."""
        if most is not None:
            self._quotas[name] = most
        else:
            self._quotas.pop(name, None)

    def most(self, name: str) -> int:
        return self._quotas.get(name, UNBOUNDED)

    def used(self, name: str = "") -> int:
        return sum(store.used(name) for store in self.stores)

    def excess(self, name: str, num_bytes: int) -> int:
        return max(0, self.used(name) + num_bytes - self.most(name))


class StoredBytes(Limit):
    """The bytes that the database records of one store, and those that are spent beside them.

    Spent are bytes that are being written, and those of removed files that still have readers. What other
    servers have stored is included at the next ``set_stored``.
    """

    def __init__(self, limit: Limit, quotas: StoredQuotas | None = None) -> None:
        super().__init__(limit.what, limit.total, each=limit.each, code=limit.code, then=limit.then)
        self.quotas = quotas or StoredQuotas()
        self.quotas.stores.append(self)
        self._stored: collections.Counter[str] = collections.Counter()

    def used(self, name: str = "") -> int:
        return super().used(name) + self._stored[name]

    def check(self, holder: str | Holder, amount: int = 1, used: Callable[[str], int] | None = None) -> None:
        """Check the quotas of the holder as well, unless ``used`` counts."""
        super().check(holder, amount, used)
        if used is None:
            self.quotas.check(holder, amount)

    def set_stored(self, counts: Mapping[Holder, int]) -> None:
        """Replace the stored bytes by those that the database has."""
        self._stored.clear()
        for holder, num_bytes in counts.items():
            self.store(num_bytes, holder)

    def store(self, num_bytes: int, holder: Holder) -> None:
        """Count bytes that the database records or, if negative, those of removed rows."""
        for name in ("", *holder.names):
            self._stored[name] += num_bytes
            if self._stored[name] <= 0:
                del self._stored[name]

    def keep(self, written: Spending) -> None:
        """Count bytes that were being written as stored."""
        self.store(written.amount, written.holder)
        written.close()


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
