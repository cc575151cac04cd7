"""Who keeps how much on this server, over all the places where something is kept.

A place (results, jobs) counts its bytes by holder as they come and go. What a tenant or a key may keep at
most, in all places together, is learned with each of their requests, so no place has to ask a database.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Final, NamedTuple

from api_schemas.errors import ApiError, ErrorCode


class Holder(NamedTuple):
    """Whose something is.

    Attributes:
        tenant: Empty on a server without keys.
        key_id: The key that it was made with, empty if that is not known.
    """

    tenant: str = ""
    key_id: str = ""

    @property
    def names(self) -> list[str]:
        """What counts go by: those whose limits hold for it."""
        named = (("tenant", self.tenant), ("key", self.key_id))
        return [f"{kind}:{name}" for kind, name in named if name]


NOBODY: Final = Holder()


class StorageUsage:
    """The bytes that are kept in one place.

    Attributes:
        total: All of them.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.total = 0
        self._by_name: collections.Counter[str] = collections.Counter()

    def of(self, name: str) -> int:
        """Return how many one of ``Holder.names`` has."""
        return self._by_name[name]

    def add(self, holder: Holder, num_bytes: int) -> None:
        """Count bytes that came or, less than none, went."""
        self.total = max(0, self.total + num_bytes)
        for name in holder.names:
            self._by_name[name] += num_bytes
            if self._by_name[name] <= 0:
                del self._by_name[name]

    def set(self, counts: Mapping[Holder, int]) -> None:
        """Learn of all there are."""
        self.total = 0
        self._by_name.clear()
        for holder, num_bytes in counts.items():
            self.add(holder, num_bytes)


class StoredBytes:
    """What is kept in all places, and how much of it may be."""

    def __init__(self) -> None:
        """Begin without places, and without limits."""
        self._places: list[StorageUsage] = []
        self._limits: dict[str, int] = {}

    def place(self) -> StorageUsage:
        """Return a new place, which counts from now on."""
        kept = StorageUsage()
        self._places.append(kept)
        return kept

    def learn(self, name: str, most: int | None) -> None:
        """Take note of what one of ``Holder.names`` may keep; None for as much as they like."""
        if most is not None:
            self._limits[name] = most
        else:
            self._limits.pop(name, None)

    def used(self, name: str) -> int:
        """Return how much one of ``Holder.names`` keeps."""
        return sum(place.of(name) for place in self._places)

    def excess(self, name: str, num_bytes: int) -> int:
        """Return by how much one of ``Holder.names`` would keep too much with so many bytes more."""
        most = self._limits.get(name)
        return 0 if most is None else max(0, self.used(name) + num_bytes - most)

    def check(self, holder: Holder, num_bytes: int) -> None:
        """Go on if a holder may keep so many bytes more.

        Raises:
            ApiError: ``stored_bytes_full``.
        """
        for name in holder.names:
            if self.excess(name, num_bytes):
                raise self.full(name, num_bytes)

    def full(self, name: str, num_bytes: int) -> ApiError:
        """Return the error for a holder who may not keep so many bytes more."""
        kind, _, who = name.partition(":")
        return ApiError(
            ErrorCode.STORED_BYTES_FULL,
            f"The {kind} {who!r} may keep {self._limits.get(name, 0)} bytes on this server and has "
            f"{self.used(name)}, so {num_bytes} more have no room: remove jobs (GET /v1/jobs lists them, "
            "DELETE /v1/jobs/{id}) or vectors (likewise /v1/vectors), or wait until jobs and results expire.",
        )


__all__ = ["NOBODY", "Holder", "StorageUsage", "StoredBytes"]
