"""The front's interface to replicas; ``handles`` implements it for Ray Serve."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Protocol

from api_schemas.errors import ApiError, ErrorCode


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaAddress:
    name: str
    url: str


class Replicas(Protocol):
    def acquire(
        self, key: bytes = b"", *, tried: Collection[str] = ()
    ) -> contextlib.AbstractAsyncContextManager[ReplicaAddress]:
        """Count a request at a chosen replica within the context; ApiError ``starting`` if none is ready."""

    async def addresses(self) -> list[ReplicaAddress]: ...


def none_ready() -> ApiError:
    return ApiError(
        ErrorCode.STARTING,
        "No replica serves this model now; GET /health/ready turns 200 when one does.",
    )


def replica_lost(name: str) -> ApiError:
    return ApiError(
        ErrorCode.REPLICA_LOST,
        f"The replica {name!r} that ran this request has stopped; send it again to another one.",
    )
