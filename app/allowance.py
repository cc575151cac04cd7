"""What one tenant may have of a finite resource, and the error beyond it.

One rule for all resources: of N units, all tenants together may have N, and one tenant a share of N, rounded
up. The share does not grow while other tenants are idle, so that a tenant that comes later finds room. On a
server without keys there is one tenant, with the empty name, which may have everything. Resources are counted
where they are used; only what may be had is computed here.
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
    """What may be had of one resource.

    Attributes:
        what: The units, for messages: ``jobs that wait``, ``bytes of vectors``.
        total: The number that all tenants together may have.
        each: The number that one tenant may have.
        code: The code of the error beyond that.
        then: What the client can do about it, for messages.
    """

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
        """Return the allowance of a resource with ``total`` units, of which a tenant may have a share."""
        return cls(what, total, part_of(total, share), code, then)

    def most(self, tenant: str) -> int:
        """Return the number that a tenant may have."""
        return self.each if tenant else self.total

    def permits(self, tenant: str, own: int, more: int = 1) -> bool:
        """Return whether a tenant that has ``own`` units may have ``more`` of them, as to its own part."""
        return not tenant or own + more <= self.each

    def check(self, tenant: str, own: int, more: int = 1) -> None:
        """Check the same; raises ApiError with ``code``."""
        if not self.permits(tenant, own, more):
            raise self._exceeded(f"The tenant {tenant!r}", self.each, own, more)

    def has_room(self, used: int, more: int = 1) -> bool:
        """Return whether there is room for ``more`` units beside the ``used`` ones of all tenants."""
        return used + more <= self.total

    def check_total(self, used: int, more: int = 1) -> None:
        """Check the same; raises ApiError with ``code``."""
        if not self.has_room(used, more):
            raise self._exceeded("This server", self.total, used, more)

    def _exceeded(self, who: str, most: int, used: int, more: int) -> ApiError:
        return ApiError(self.code, said_exceeded(who, most, self.what, used, more, self.then))


def said_exceeded(who: str, most: int, what: str, used: int, more: int, then: str) -> str:
    """Return the message of every limit on what may be had at a time.

    Args:
        who: Whose limit it is: ``The tenant 'acme'``.
        most: The limit.
        what: Its units.
        used: How many are in use.
        more: How many more were asked for.
        then: What the client can do.
    """
    asked = "" if more == 1 else f", and this asks for {more} more"
    return f"{who} may have {most} {what} and has {used}{asked}; {then}."


def part_of(total: int, share: float) -> int:
    """Return the part of ``total`` units that a share is: as many as its decimal number says, rounded up."""
    # In floating point 0.07 * 100 is more than 7.
    return math.ceil(Fraction(str(share)) * total)


__all__ = ["UNBOUNDED", "Allowance", "part_of", "said_exceeded"]
