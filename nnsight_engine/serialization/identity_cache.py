"""A bounded cache of values derived from objects of this process, keyed by identity.

Code objects and compiled blocks are sent repeatedly by loops. Equal code objects may come from different
files, so the key is the identity, and the cache keeps the object alive so that its ``id`` is not reused.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Found = TypeVar("Found")


class IdentityCache(Generic[Key, Found]):
    """A bounded table keyed by identity that evicts its oldest entries; safe to use from several threads."""

    def __init__(self, max_entries: int = 256) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[int, tuple[Key, Found]] = OrderedDict()

    def get(self, key: Key) -> Found | None:
        """Return the value stored for an object, or None."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0] is key else None

    def put(self, key: Key, found: Found) -> Found:
        """Store a value for an object, and return the value."""
        self._entries[id(key)] = (key, found)
        if len(self._entries) > self._max_entries:
            with contextlib.suppress(KeyError):  # another thread was faster
                self._entries.popitem(last=False)
        return found
