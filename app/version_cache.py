from __future__ import annotations

import collections
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


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


__all__ = ["VersionCache"]
