"""Vectors of live requests, each held once however many requests use it.

A vector is known by the hash of its content; what a kernel needs of it (scaled, normalised)
is derived once per distinct scale. Requests acquire at registration and release at their
end; what nobody uses any more is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BankKey = tuple[str, str, float]


class VectorBank:
    """Reference-counted tensors by content hash, derivation and scale."""

    def __init__(self) -> None:
        """Start empty."""
        self._tensors: dict[BankKey, torch.Tensor] = {}
        self._num_users: dict[BankKey, int] = {}

    def __len__(self) -> int:
        """Return how many tensors are held."""
        return len(self._tensors)

    def acquire(self, key: BankKey, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor for ``key``, made by ``make`` on first use, and count one user more."""
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = make()
        self._num_users[key] = self._num_users.get(key, 0) + 1
        return tensor

    def release(self, keys: list[BankKey]) -> None:
        """Count one user less for each key; the last one frees the tensor."""
        for key in keys:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._tensors[key]
