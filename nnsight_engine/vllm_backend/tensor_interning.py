"""Deduplication of tensors of several requests in the engine's process.

Each request carries the contents of the tensors in its plan. The table returns the first copy of equal
contents, so that a vector used by a thousand requests is stored once while they wait and run.
"""

from __future__ import annotations

from typing import Any

TensorEntries = dict[str, Any]
"""Content hash to ``(dtype, shape, bytes)``."""


class TensorTable:
    """Reference-counted tensor contents by hash."""

    def __init__(self) -> None:
        self._contents: dict[str, Any] = {}
        self._num_users: dict[str, int] = {}
        self._keys: dict[str, list[str]] = {}

    def __len__(self) -> int:
        """Return the number of stored contents."""
        return len(self._contents)

    def acquire(self, request_id: str, entries: TensorEntries) -> TensorEntries:
        """Return the same entries, with contents that are already stored taken from the table."""
        if request_id in self._keys:
            return entries
        self._keys[request_id] = list(entries)
        for key, content in entries.items():
            self._contents.setdefault(key, content)
            self._num_users[key] = self._num_users.get(key, 0) + 1
        return {key: self._contents[key] for key in entries}

    def release(self, request_id: str) -> None:
        """Release the request's contents; those without further users are freed."""
        for key in self._keys.pop(request_id, ()):
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._contents[key]
