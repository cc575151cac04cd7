"""Bounds the memory of data received from clients: bodies of requests, WebSocket messages.

One body may be large, and a connection may pause for minutes while sending it. The bytes of all of them
together are therefore bounded, and each tenant has a share of that. Bytes are counted as they arrive and stay
counted until the request has been answered. ``body`` and the WebSockets of jobs count them;
``GateMiddleware`` releases them.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Final

from api_schemas.errors import ErrorCode
from app.allowance import UNBOUNDED, Allowance

_SOCKETS: Final = Allowance("open WebSockets", UNBOUNDED, 64, ErrorCode.RATE_LIMITED, "close some")
"""Each buffers partially received messages outside of the counts."""


class ReceivedBytes:
    """The received bytes that one server holds.

    Args:
        allowance: The bytes that all clients together, and one tenant, may have.

    Attributes:
        num_bytes: The number of bytes held now.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._of_tenant: collections.Counter[str] = collections.Counter()
        self._sockets: collections.Counter[str] = collections.Counter()
        self.num_bytes = 0

    def intake(self, tenant: str) -> Intake:
        """Return the counter of one connection; ``tenant`` is empty on a server without keys."""
        return Intake(self, tenant)

    @contextlib.contextmanager
    def socket(self, tenant: str) -> Iterator[None]:
        """Count an open WebSocket for the duration of the block.

        Bounds the partially received messages, which are buffered outside this counter.

        Raises:
            ApiError: ``rate_limit_exceeded``: the tenant has too many open WebSockets.
        """
        _SOCKETS.check(tenant, self._sockets[tenant])
        self._sockets[tenant] += 1
        try:
            yield
        finally:
            self._sockets[tenant] -= 1
            if not self._sockets[tenant]:
                del self._sockets[tenant]

    def add(self, num_bytes: int, tenant: str) -> None:
        """Count received bytes.

        Raises:
            ApiError: ``rate_limit_exceeded``: the bytes exceed the limit of the tenant or of the server.
        """
        self._allowance.check(tenant, self._of_tenant[tenant], num_bytes)
        self._allowance.check_total(self.num_bytes, num_bytes)
        self.release(-num_bytes, tenant)

    def release(self, num_bytes: int, tenant: str) -> None:
        """Release bytes that are no longer held."""
        self.num_bytes -= num_bytes
        self._of_tenant[tenant] -= num_bytes
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


class Intake:
    """The received bytes held for one connection.

    Attributes:
        tenant: The tenant; empty on a server without keys.
        num_bytes: The number of bytes held.
    """

    def __init__(self, receiving: ReceivedBytes, tenant: str) -> None:
        self._receiving = receiving
        self.tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count received bytes.

        Raises:
            ApiError: ``rate_limit_exceeded``: the bytes exceed the limit of the tenant or of the server.
        """
        self._receiving.add(num_bytes, self.tenant)
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Release bytes that are no longer held."""
        self._receiving.release(num_bytes, self.tenant)
        self.num_bytes -= num_bytes

    def close(self) -> None:
        """Release all bytes; idempotent."""
        if self.num_bytes:
            self.release(self.num_bytes)


__all__ = ["Intake", "ReceivedBytes"]
