"""Accounts stored bytes by tenant and key, over all stores.

Limits are updated with each request, so that no store has to query a database.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Final, NamedTuple

from api_schemas.errors import ApiError, ErrorCode
from app.allowance import limit_message

_MAKE_ROOM: Final = (
    "remove jobs (GET /v1/jobs lists them, DELETE /v1/jobs/{id}), vectors, detectors, dictionaries or "
    "presets (likewise /v1/vectors, /v1/detectors, /v1/dictionaries, /v1/presets), or wait until jobs and "
    "results expire"
)


class Holder(NamedTuple):
    """The owner of stored data, empty without keys; ``key_id`` is empty if unknown."""

    tenant: str = ""
    key_id: str = ""

    @property
    def names(self) -> list[str]:
        """The names under which the bytes are counted and whose limits apply."""
        named = (("tenant", self.tenant), ("key", self.key_id))
        return [f"{kind}:{name}" for kind, name in named if name]


NO_HOLDER: Final = Holder()


class StorageUsage:
    def __init__(self) -> None:
        self.total = 0
        self._by_name: collections.Counter[str] = collections.Counter()

    def of(self, name: str) -> int:
        return self._by_name[name]

    def add(self, holder: Holder, num_bytes: int) -> None:
        """Count added bytes or, if negative, removed ones."""
        self.total = max(0, self.total + num_bytes)
        for name in holder.names:
            self._by_name[name] += num_bytes
            if self._by_name[name] <= 0:
                del self._by_name[name]

    def set(self, counts: Mapping[Holder, int]) -> None:
        self.total = 0
        self._by_name.clear()
        for holder, num_bytes in counts.items():
            self.add(holder, num_bytes)


class StoredBytes:
    def __init__(self) -> None:
        self._places: list[StorageUsage] = []
        self._limits: dict[str, int] = {}

    def place(self) -> StorageUsage:
        kept = StorageUsage()
        self._places.append(kept)
        return kept

    def set_limits(self, name: str, most: int | None) -> None:
        """Set the limit of one of ``Holder.names``; None for no limit."""
        if most is not None:
            self._limits[name] = most
        else:
            self._limits.pop(name, None)

    def used(self, name: str) -> int:
        return sum(place.of(name) for place in self._places)

    def excess(self, name: str, num_bytes: int) -> int:
        most = self._limits.get(name)
        return 0 if most is None else max(0, self.used(name) + num_bytes - most)

    def check(self, holder: Holder, num_bytes: int) -> None:
        """Raise ``stored_bytes_full`` unless a holder may store ``num_bytes`` more."""
        for name in holder.names:
            if self.excess(name, num_bytes):
                raise self.full(name, num_bytes)

    def full(self, name: str, num_bytes: int) -> ApiError:
        kind, _, who = name.partition(":")
        return ApiError(
            ErrorCode.STORED_BYTES_FULL,
            limit_message(
                f"The {kind} {who!r}",
                self._limits.get(name, 0),
                "stored bytes",
                self.used(name),
                num_bytes,
                _MAKE_ROOM,
            ),
        )


__all__ = ["NO_HOLDER", "Holder", "StorageUsage", "StoredBytes"]
