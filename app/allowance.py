"""The limit of a finite resource: all tenants together may use N units, one tenant a share of N, rounded up.

The share does not grow while other tenants are idle, so that a later tenant still gets its own. A server
without keys has one tenant, with the empty name, which may use everything.
"""

from __future__ import annotations

import dataclasses
import math
import sys
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


__all__ = ["UNBOUNDED", "Allowance", "limit_message", "part_of"]
