"""Bounds the memory of data received from clients: bodies of requests, WebSocket messages.

Bytes are counted as they arrive, with a share for each tenant, until the request has been answered.
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
    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._of_tenant: collections.Counter[str] = collections.Counter()
        self._sockets: collections.Counter[str] = collections.Counter()
        self.num_bytes = 0

    def intake(self, tenant: str) -> Intake:
        return Intake(self, tenant)

    @contextlib.contextmanager
    def socket(self, tenant: str) -> Iterator[None]:
        """Count an open WebSocket, whose partial messages are buffered outside; ``rate_limit_exceeded``."""
        _SOCKETS.check(tenant, self._sockets[tenant])
        self._sockets[tenant] += 1
        try:
            yield
        finally:
            self._sockets[tenant] -= 1
            if not self._sockets[tenant]:
                del self._sockets[tenant]

    def add(self, num_bytes: int, tenant: str) -> None:
        """Count received bytes; ``rate_limit_exceeded`` beyond the limit of the tenant or of the server."""
        self._allowance.check(tenant, self._of_tenant[tenant], num_bytes)
        self._allowance.check_total(self.num_bytes, num_bytes)
        self.release(-num_bytes, tenant)

    def release(self, num_bytes: int, tenant: str) -> None:
        self.num_bytes -= num_bytes
        self._of_tenant[tenant] -= num_bytes
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]


class Intake:
    def __init__(self, receiving: ReceivedBytes, tenant: str) -> None:
        self._receiving = receiving
        self.tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._receiving.add(num_bytes, self.tenant)
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._receiving.release(num_bytes, self.tenant)
        self.num_bytes -= num_bytes

    def close(self) -> None:
        """Release all bytes; idempotent."""
        if self.num_bytes:
            self.release(self.num_bytes)


__all__ = ["Intake", "ReceivedBytes"]
