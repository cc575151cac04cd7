"""What was found out of objects of this process, by their identity, for as many as there is room for.

Codes of functions and compiled blocks are sent again and again by a loop, and equal codes may come from
different files: identity is what counts, and the object is kept so that its ``id`` stays its own.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Found = TypeVar("Found")


class IdentityCache(Generic[Key, Found]):
    """A table by identity that forgets its oldest entries; may be used by many threads."""

    def __init__(self, max_entries: int = 256) -> None:
        """Start empty."""
        self._max_entries = max_entries
        self._entries: OrderedDict[int, tuple[Key, Found]] = OrderedDict()

    def get(self, key: Key) -> Found | None:
        """Return what is known of an object."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0] is key else None

    def put(self, key: Key, found: Found) -> Found:
        """Remember something of an object, and return it."""
        self._entries[id(key)] = (key, found)
        if len(self._entries) > self._max_entries:
            with contextlib.suppress(KeyError):  # another thread was faster
                self._entries.popitem(last=False)
        return found
