from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from api_schemas.administration import Scope
from app.auth.principal import Principal
from app.storage.quotas import Holder, StoredBytes
from app.storage.versions import VersionStore

StoreT = TypeVar("StoreT", bound=VersionStore[Any, Any])
T = TypeVar("T")


class VersionService(Generic[StoreT]):
    def __init__(self, store: StoreT, stored: StoredBytes) -> None:
        self._store = store
        self._stored, self._kept = stored, stored.place()
        self._adding = asyncio.Lock()

    @property
    def used_bytes(self) -> int:
        return self._kept.total

    async def count(self) -> None:
        """Update the stored bytes of each tenant from the database, where other servers write too."""
        self._kept.set(await self._store.used_bytes())

    async def _add(self, tenant: str, num_bytes: int, add: Callable[[], Awaitable[T]]) -> T:
        """Store a version by calling ``add``; ``stored_bytes_full`` without room for ``num_bytes``."""
        async with self._adding:  # or concurrent requests could each pass the check for the same free bytes
            await self.count()
            self._stored.check(Holder(tenant), num_bytes)
            added = await add()
            await self.count()
        return added

    async def _remove(self, id_: str, caller: Principal, *, shared: bool, own: bool) -> None:
        check_changing(caller, shared=shared, own=own)
        await self._store.remove(id_, caller.tenant)
        await self.count()


def check_sharing(caller: Principal, *, shared: bool) -> None:
    """Raise ApiError if a caller without the scope ``admin`` wants to share something."""
    if shared:
        caller.check(Scope.ADMIN)


def check_changing(caller: Principal, *, shared: bool, own: bool) -> None:
    """Raise ApiError if a caller may not change or delete a version that it sees.

    A shared one requires ``admin``. Without keys nobody has that: there the caller may delete its own, which
    are the examples that the server has stored.
    """
    if shared and (caller.has_key or not own):
        caller.check(Scope.ADMIN)


class VersionCache:
    """An LRU cache of contents by the kind of version, and its number in the database."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: collections.OrderedDict[tuple[str, int], tuple[Any, int]] = collections.OrderedDict()

    async def get(
        self, kind: str, number: int, read: Callable[[int], Awaitable[tuple[T, int] | None]]
    ) -> T | None:
        """Return a content, or None if its version was deleted; ``read`` also returns its size in bytes."""
        key = kind, number
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
            content: T = held[0]
            return content
        found = await read(number)
        if found is None:
            return None
        if key not in self._held and found[1] <= self._max_bytes:
            self._held[key] = found
            self._num_bytes += found[1]
            while self._num_bytes > self._max_bytes:
                _, dropped = self._held.popitem(last=False)
                self._num_bytes -= dropped[1]
        return found[0]
