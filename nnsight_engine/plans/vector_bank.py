"""Vectors of live requests, each held once for all requests that use it.

A vector is identified by the hash of its content; the form that a kernel needs (scaled, normalized)
is derived once per distinct scale. Requests acquire at registration and release at their
end; a vector without users is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BankKey = tuple[str, str, float]


class VectorBank:
    """Reference-counted tensors by content hash, derivation and scale."""

    def __init__(self) -> None:
        self._tensors: dict[BankKey, torch.Tensor] = {}
        self._num_users: dict[BankKey, int] = {}

    def __len__(self) -> int:
        """Return the number of tensors held."""
        return len(self._tensors)

    def acquire(self, key: BankKey, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor for ``key``, created by ``make`` on first use, and add a user."""
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = make()
        self._num_users[key] = self._num_users.get(key, 0) + 1
        return tensor

    def release(self, keys: list[BankKey]) -> None:
        """Remove one user of each key; without users the tensor is freed."""
        for key in keys:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._tensors[key]
