"""Tracks readers of stored files: a removed file occupies disk space until its last reader has closed it.

Its bytes stay counted until then, and readers per tenant are limited: opening files without reading them
does not get around the quotas.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import BinaryIO, Final

from api_schemas.errors import ErrorCode
from app.allowance import UNBOUNDED, Allowance
from app.storage.storage_usage import Holder

_CHUNK_BYTES: Final = 1024 * 1024
_DOWNLOADS: Final = Allowance(
    "downloads under way", UNBOUNDED, 64, ErrorCode.RATE_LIMITED, "end some, or wait until they have ended"
)
Key = tuple[str, int]
"""A store's key for a file: an id, and a number among the files of that id."""


@dataclasses.dataclass(slots=True, eq=False)
class OpenFile:
    """One reader of a file of ``holder``; ``close`` unregisters it and is idempotent."""

    key: Key
    holder: Holder
    num_bytes: int
    close: Callable[[], None]


class OpenFiles:
    def __init__(self) -> None:
        self._readers: dict[Key, list[OpenFile]] = {}
        self._of_tenant: collections.Counter[str] = collections.Counter()
        self._then: dict[Key, list[Callable[[], None]]] = {}

    def begin(self, key: Key, holder: Holder, num_bytes: int) -> OpenFile:
        """Register a reader before its file is opened; ``rate_limit_exceeded`` if the tenant has too many."""
        tenant = holder.tenant
        _DOWNLOADS.check(tenant, self._of_tenant[tenant])
        reading = OpenFile(key, holder, num_bytes, lambda: self._end(reading))
        self._of_tenant[tenant] += 1
        self._readers.setdefault(key, []).append(reading)
        return reading

    def is_open(self, key: Key) -> bool:
        return key in self._readers

    def all(self) -> list[OpenFile]:
        """Return one reader of each file."""
        return [readers[0] for readers in self._readers.values()]

    def when_closed(self, key: Key, then: Callable[[], None]) -> None:
        """Call ``then`` when no reader of the file is left; immediately if there is none."""
        if self.is_open(key):
            self._then.setdefault(key, []).append(then)
        else:
            then()

    def _end(self, reading: OpenFile) -> None:
        readers = self._readers.get(reading.key, [])
        if reading not in readers:
            return
        readers.remove(reading)
        self._of_tenant[reading.holder.tenant] -= 1
        if not self._of_tenant[reading.holder.tenant]:
            del self._of_tenant[reading.holder.tenant]
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
        rest = (self.num_bytes if stop is None else stop) - start
        try:
            self._file.seek(start)
            while rest > 0 and (chunk := await asyncio.to_thread(self._file.read, min(rest, _CHUNK_BYTES))):
                rest -= len(chunk)
                yield chunk
        finally:
            await self.close()

    async def close(self) -> None:
        # Closing a read-only file flushes nothing, so it needs no thread.
        self._file.close()
        self._reading.close()


__all__ = ["OpenFile", "OpenFiles", "OpenResult"]
