"""Equal tensors of several requests, kept once in the engine's process.

Each request brings the content of the tensors its plan names. The table hands back the
first copy of each, so that a vector used by a thousand requests is held once while they
wait and run.
"""

from __future__ import annotations

from typing import Any

TensorEntries = dict[str, Any]
"""Content hash to ``(dtype, shape, bytes)``."""


class TensorTable:
    """Reference-counted tensor contents by hash."""

    def __init__(self) -> None:
        """Start empty."""
        self._contents: dict[str, Any] = {}
        self._num_users: dict[str, int] = {}
        self._keys: dict[str, list[str]] = {}

    def __len__(self) -> int:
        """Return how many contents are held."""
        return len(self._contents)

    def acquire(self, request_id: str, entries: TensorEntries) -> TensorEntries:
        """Return the same entries with each content that is already known taken from the table."""
        if request_id in self._keys:
            return entries
        self._keys[request_id] = list(entries)
        for key, content in entries.items():
            self._contents.setdefault(key, content)
            self._num_users[key] = self._num_users.get(key, 0) + 1
        return {key: self._contents[key] for key in entries}

    def release(self, request_id: str) -> None:
        """Let go of the request's contents; those that nobody else uses are freed."""
        for key in self._keys.pop(request_id, ()):
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._contents[key]
