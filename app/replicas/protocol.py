"""What the front needs of whoever runs replicas; ``handles`` is Ray Serve's, tests have their own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Protocol

from api_schemas.errors import ApiError, ErrorCode


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a replica is.

    Attributes:
        name: The replica's.
        url: Of its server.
    """

    name: str
    url: str


class Replicas(Protocol):
    """The replicas of one model."""

    def taken(
        self, key: bytes = b"", *, tried: Collection[str] = ()
    ) -> contextlib.AbstractAsyncContextManager[Place]:
        """Choose a replica, see ``choosing``, and count a request there for the length of the block.

        Raises:
            ApiError: ``starting``: none is there in time.
        """

    async def places(self) -> list[Place]:
        """Return where all of them are."""


def none_ready() -> ApiError:
    """Return what a request is told that no replica can take."""
    return ApiError(
        ErrorCode.STARTING,
        "No replica serves this model now; GET /health/ready turns 200 when one does.",
    )


def lost(name: str) -> ApiError:
    """Return what a request is told whose replica has gone in the middle of it."""
    return ApiError(
        ErrorCode.REPLICA_LOST,
        f"The replica {name!r} that ran this request has stopped; send it again to another one.",
    )


__all__ = ["Place", "Replicas", "lost", "none_ready"]
