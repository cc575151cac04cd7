"""Received code, compiled once: the same piece often comes again, with the next request.

What is kept here was chosen by whoever sends code, and stays when their request is over, so it has a bound in
entries and one in characters of what was sent: names count as text does.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")

_LONGEST = 16 * 1024
_MAX_CHARACTERS = 2**18


class CodeCache(Generic[Value]):
    """What pieces of code became, by all that it was made from; the least recently used goes first."""

    def __init__(
        self, max_entries: int, *, longest: int = _LONGEST, max_characters: int = _MAX_CHARACTERS
    ) -> None:
        """Start empty.

        Args:
            max_entries: How many are kept.
            longest: Characters of a piece that is kept at all.
            max_characters: Characters of all of them together.
        """
        self._max_entries, self._max_characters, self._longest = max_entries, max_characters, longest
        self._entries: collections.OrderedDict[Hashable, tuple[int, Value]] = collections.OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, num_characters: int, make: Callable[[], Value]) -> Value:
        """Return what belongs to ``key``, which is that long; made now if it is not here."""
        if num_characters > self._longest:
            return make()
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry[1]
        made = make()
        with self._lock:
            before = self._entries.pop(key, None)  # another thread may have been as fast
            self._entries[key] = (num_characters, made)
            self._num_characters += num_characters - (before[0] if before is not None else 0)
            while len(self._entries) > self._max_entries or self._num_characters > self._max_characters:
                _, (length, _) = self._entries.popitem(last=False)
                self._num_characters -= length
        return made


__all__ = ["CodeCache"]
