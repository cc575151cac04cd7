"""The front's interface to replicas; ``handles`` implements it for Ray Serve, tests have doubles."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Protocol

from api_schemas.errors import ApiError, ErrorCode


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """The address of a replica.

    Attributes:
        name: The replica's name.
        url: The URL of its server.
    """

    name: str
    url: str


class Replicas(Protocol):
    """The replicas of one model."""

    def acquire(
        self, key: bytes = b"", *, tried: Collection[str] = ()
    ) -> contextlib.AbstractAsyncContextManager[ReplicaAddress]:
        """Choose a replica, see ``replica_ranking``, and count a request there within the context.

        Raises:
            ApiError: ``starting``: no replica is ready in time.
        """

    async def addresses(self) -> list[ReplicaAddress]:
        """Return the addresses of all replicas."""


def none_ready() -> ApiError:
    """Return the error for a request that no replica can accept."""
    return ApiError(
        ErrorCode.STARTING,
        "No replica serves this model now; GET /health/ready turns 200 when one does.",
    )


def replica_lost(name: str) -> ApiError:
    """Return the error for a request whose replica failed while it ran."""
    return ApiError(
        ErrorCode.REPLICA_LOST,
        f"The replica {name!r} that ran this request has stopped; send it again to another one.",
    )


__all__ = ["ReplicaAddress", "Replicas", "none_ready", "replica_lost"]
