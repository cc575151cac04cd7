"""Batches lookups of keys: random ids cause a few statements per second, not a query for each.

An id requested while a statement runs, or shortly after it, is read by the next one with all others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, Generic, TypeVar

_PAUSE_S: Final = 0.05
"""The pause between two statements, in seconds."""

_Found = TypeVar("_Found")


class Lookups(Generic[_Found]):
    def __init__(self, read: Callable[[Collection[str]], Awaitable[Mapping[str, _Found]]]) -> None:
        self._read = read
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[Mapping[str, _Found]] | None = None
        self._requested: set[str] = set()
        self._free_at = 0.0

    async def find(self, key_id: str) -> _Found | None:
        """Return the value of an id, read after this call began, or None."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_next())
        self._requested.add(key_id)
        # Others wait for the same task, so a cancelled caller must not cancel it.
        return (await asyncio.shield(self._next)).get(key_id)

    async def _read_next(self) -> Mapping[str, _Found]:
        async with self._turn:
            await asyncio.sleep(max(0.0, self._free_at - time.monotonic()))
            requested, self._requested, self._next = self._requested, set(), None
            try:
                return await self._read(requested)
            finally:
                self._free_at = time.monotonic() + _PAUSE_S


__all__ = ["Lookups"]
