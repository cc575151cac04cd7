"""What clients have sent and the server still holds in memory: bodies of requests, answers of clients.

One body may be large, and a connection may stay for minutes in the middle of sending it, so the bytes of all
of them together are bounded, and of one tenant a share. They are counted as they come, and held until the
request has been answered. ``body`` and the WebSockets of jobs count; the outermost middleware gives back.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Final

from starlette.types import Scope

from api_schemas.errors import ApiError, ErrorCode

INTAKE: Final = "nnsight_engine.intake"
"""Where the scope of a connection has its ``Intake``."""

_MAX_SOCKETS: Final = 64


class ReceivedBytes:
    """What one server holds.

    Args:
        max_bytes: Of all clients.
        share: The part of that which one tenant's may be.
    """

    def __init__(self, max_bytes: int, share: float = 1.0) -> None:
        """Begin with nothing."""
        self._max_bytes = max_bytes
        self._max_tenant_bytes = int(max_bytes * share)
        self._of_tenant: collections.Counter[str] = collections.Counter()
        self._sockets: collections.Counter[str] = collections.Counter()
        self.num_bytes = 0

    def intake(self, tenant: str) -> Intake:
        """Return the count of one connection of a tenant, or of whoever there is on a server without keys."""
        return Intake(self, tenant)

    @contextlib.contextmanager
    def socket(self, tenant: str) -> Iterator[None]:
        """Count a connection that stays; what it has half sent is held by others.

        Raises:
            ApiError: ``rate_limit_exceeded``: the tenant has too many.
        """
        if tenant and self._sockets[tenant] >= _MAX_SOCKETS:
            raise ApiError(
                ErrorCode.RATE_LIMITED,
                f"{_MAX_SOCKETS} WebSockets of the tenant {tenant!r} are open, no more may be; close some.",
            )
        self._sockets[tenant] += 1
        try:
            yield
        finally:
            self._sockets[tenant] -= 1
            if not self._sockets[tenant]:
                del self._sockets[tenant]

    def add(self, num_bytes: int, tenant: str) -> None:
        """Count bytes that came.

        Raises:
            ApiError: ``rate_limit_exceeded``: there is no room for them now.
        """
        if tenant and self._of_tenant[tenant] + num_bytes > self._max_tenant_bytes:
            raise _full(f"of the tenant {tenant!r} ", self._max_tenant_bytes)
        if self.num_bytes + num_bytes > self._max_bytes:
            raise _full("", self._max_bytes)
        self.give_back(-num_bytes, tenant)

    def give_back(self, num_bytes: int, tenant: str) -> None:
        """Forget bytes that are no longer held."""
        self.num_bytes -= num_bytes
        self._of_tenant[tenant] -= num_bytes
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


class Intake:
    """What of one connection is held.

    Attributes:
        tenant: Whose it is; empty on a server without keys.
        num_bytes: How much.
    """

    def __init__(self, receiving: ReceivedBytes, tenant: str) -> None:
        """Begin with nothing."""
        self._receiving = receiving
        self.tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that came.

        Raises:
            ApiError: ``rate_limit_exceeded``: there is no room for them now.
        """
        self._receiving.add(num_bytes, self.tenant)
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Forget bytes that are no longer held."""
        self._receiving.give_back(num_bytes, self.tenant)
        self.num_bytes -= num_bytes

    def close(self) -> None:
        """Forget all of them; harmless when repeated."""
        if self.num_bytes:
            self.give_back(self.num_bytes)


def intake_of(scope: Scope) -> Intake | None:
    """Return the count of a connection whose caller is known."""
    intake: Intake | None = scope.get(INTAKE)
    return intake


def _full(whose: str, most: int) -> ApiError:
    return ApiError(
        ErrorCode.RATE_LIMITED,
        f"Requests {whose}that are being sent or answered may have {most} bytes together, and have them; "
        "send this one again when some have ended.",
    )


__all__ = ["INTAKE", "Intake", "ReceivedBytes", "intake_of"]
