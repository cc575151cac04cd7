"""Deduplication of tensors of several requests in the engine's process, while they wait and run."""

from __future__ import annotations

from typing import Any

TensorEntries = dict[str, Any]
"""Content hash to ``(dtype, shape, bytes)``."""


class TensorTable:
    def __init__(self) -> None:
        self._contents: dict[str, Any] = {}
        self._num_users: dict[str, int] = {}
        self._keys: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def acquire(self, request_id: str, entries: TensorEntries) -> TensorEntries:
        if request_id in self._keys:
            return entries
        self._keys[request_id] = list(entries)
        for key, content in entries.items():
            self._contents.setdefault(key, content)
            self._num_users[key] = self._num_users.get(key, 0) + 1
        return {key: self._contents[key] for key in entries}

    def release(self, request_id: str) -> None:
        for key in self._keys.pop(request_id, ()):
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._contents[key]
