"""Keys looked up together: however many ids are asked for, the database reads few statements a second.

Otherwise whoever sends ids at random has each of them read. An id that comes while a statement runs, or just
after one, is read by the next, with all others that came: so no id waits longer for how many they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, Generic, TypeVar

_PAUSE_S: Final = 0.05
"""Between two statements."""

_Found = TypeVar("_Found")


class Lookups(Generic[_Found]):
    """Looks up what belongs to ids.

    Args:
        read: Returns, of some ids, what belongs to those that there are.
    """

    def __init__(self, read: Callable[[Collection[str]], Awaitable[Mapping[str, _Found]]]) -> None:
        """Have read nothing yet."""
        self._read = read
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[Mapping[str, _Found]] | None = None
        self._asked: set[str] = set()
        self._free_at = 0.0

    async def find(self, key_id: str) -> _Found | None:
        """Return what belongs to an id, as it is no earlier than now."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_next())
        self._asked.add(key_id)
        # Others wait for it, whoever of them gives up.
        return (await asyncio.shield(self._next)).get(key_id)

    async def _read_next(self) -> Mapping[str, _Found]:
        async with self._turn:
            await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
            asked, self._asked, self._next = self._asked, set(), None
            try:
                return await self._read(asked)
            finally:
                self._free_at = time.monotonic() + _PAUSE_S


__all__ = ["Lookups"]
