"""The limit of a finite resource: all tenants together may use N units, one tenant a share of N, rounded up.

The share does not grow while other tenants are idle, so that a later tenant still gets its own. A server
without keys has one tenant, with the empty name, which may use everything.

The memory of bodies and WebSocket messages is such a resource, ``ReceivedBytes``: bytes are counted as they
arrive, until the request has been answered.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Final, Self

from api_schemas.errors import ApiError, ErrorCode

UNBOUNDED: Final = sys.maxsize
"""The total of a resource that is bounded per tenant only."""
_SEND_AGAIN: Final = "send this one again later"


@dataclasses.dataclass(frozen=True, slots=True)
class Allowance:
    """Limits of one resource; ``what`` (its units) and ``then`` (the client's next step) are for messages."""

    what: str
    total: int
    each: int
    code: ErrorCode = ErrorCode.QUEUE_FULL
    then: str = _SEND_AGAIN

    @classmethod
    def of(
        cls,
        what: str,
        total: int,
        share: float = 1.0,
        code: ErrorCode = ErrorCode.QUEUE_FULL,
        then: str = _SEND_AGAIN,
    ) -> Self:
        return cls(what, total, part_of(total, share), code, then)

    def most(self, tenant: str) -> int:
        return self.each if tenant else self.total

    def permits(self, tenant: str, own: int, more: int = 1) -> bool:
        return not tenant or own + more <= self.each

    def check(self, tenant: str, own: int, more: int = 1) -> None:
        if not self.permits(tenant, own, more):
            raise self._exceeded(f"The tenant {tenant!r}", self.each, own, more)

    def has_room(self, used: int, more: int = 1) -> bool:
        return used + more <= self.total

    def check_total(self, used: int, more: int = 1) -> None:
        if not self.has_room(used, more):
            raise self._exceeded("This server", self.total, used, more)

    def _exceeded(self, who: str, most: int, used: int, more: int) -> ApiError:
        return ApiError(self.code, limit_message(who, most, self.what, used, more, self.then))


def limit_message(who: str, most: int, what: str, used: int, more: int, then: str) -> str:
    """Return the message for an exceeded limit; ``who`` holds it: ``The tenant 'acme'``."""
    asked = "" if more == 1 else f", and this asks for {more} more"
    return f"{who} may have {most} {what} and has {used}{asked}; {then}."


def part_of(total: int, share: float) -> int:
    """Return a share of ``total`` units, rounded up; the share counts as its decimal notation says."""
    # In floating point 0.07 * 100 is more than 7.
    return math.ceil(Fraction(str(share)) * total)


class ThrottledError(ApiError):
    """A request beyond its caller's limits; its headers are ``Retry-After`` and OpenAI's rate limits."""

    def __init__(self, message: str, headers: dict[str, str]) -> None:
        super().__init__(ErrorCode.RATE_LIMITED, message)
        self.headers = headers


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
