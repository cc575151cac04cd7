"""The limit of a finite resource: all tenants together may use N units, one tenant a share of N, rounded up.

The share does not grow while other tenants are idle, so that a later tenant still gets its own. A server
without keys has one tenant, with the empty name, which may use everything.

Usage is counted by names: a tenant's name, a key's id after ``key:``, and the empty name for all together.
"""

from __future__ import annotations

import collections
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from types import TracebackType
from typing import Final, NamedTuple, Self

from api_schemas.errors import ApiError, ErrorCode

UNBOUNDED: Final = sys.maxsize
"""The total of a resource that is bounded per tenant only."""
_KEY: Final = "key:"
"""No tenant's name contains a colon."""


class Holder(NamedTuple):
    """The owner of what is used, empty without keys; ``key_id`` is empty if unknown."""

    tenant: str = ""
    key_id: str = ""

    @property
    def names(self) -> list[str]:
        """The names under which the usage is counted, and whose limits apply."""
        return [name for name in (self.tenant, name_of_key(self.key_id)) if name]


def name_of_key(key_id: str) -> str:
    return f"{_KEY}{key_id}" if key_id else ""


def subject(name: str) -> str:
    """Return a name as the subject of a message: ``The tenant 'acme'``."""
    if not name:
        return "This server"
    return f"The key {name.removeprefix(_KEY)!r}" if name.startswith(_KEY) else f"The tenant {name!r}"


def part_of(total: int, share: float) -> int:
    """Return a share of ``total`` units, rounded up; the share counts as its decimal notation says."""
    # In floating point 0.07 * 100 is more than 7.
    return math.ceil(Fraction(str(share)) * total)


class Limit:
    """Counts what is spent of a resource, and refuses more than ``total``, or than ``each`` of one tenant.

    ``what`` (the units) and ``then`` (the client's next step) are for messages.
    """

    def __init__(
        self,
        what: str,
        total: int,
        share: float = 1.0,
        *,
        each: int | None = None,
        code: ErrorCode = ErrorCode.QUEUE_FULL,
        then: str = "send this one again later",
    ) -> None:
        self.what = what
        self.total = total
        self.each = part_of(total, share) if each is None else each
        self.code = code
        self.then = then
        self._used: collections.Counter[str] = collections.Counter()

    def most(self, name: str) -> int:
        """Return the most units of a tenant, or of all for the empty name; keys have no limit here."""
        if name.startswith(_KEY):
            return UNBOUNDED
        return self.each if name else self.total

    def used(self, name: str = "") -> int:
        return self._used[name]

    def has_room(self, tenant: str, amount: int = 1) -> bool:
        return all(self.used(name) + amount <= self.most(name) for name in (tenant, ""))

    def check(self, holder: str | Holder, amount: int = 1, used: Callable[[str], int] | None = None) -> None:
        """Raise the limit's error if ``amount`` more is too much for the tenant, or for all together.

        ``used`` returns what a tenant uses, or all with the empty name, if something else counts it, such
        as a database.
        """
        used = used or self.used
        for name in (*_holder(holder).names, ""):
            if used(name) + amount > self.most(name):
                raise self.exceeded(name, self.most(name), used(name), amount)

    def exceeded(self, name: str, most: int, used: int, amount: int = 1) -> ApiError:
        """Return the error for ``amount`` units more than the ``used`` ones, if ``most`` are allowed."""
        amount_text = "" if amount == 1 else f", and this asks for {amount} more"
        message = f"{subject(name)} may have {most} {self.what} and has {used}{amount_text}; {self.then}."
        return ApiError(self.code, message)

    def spend(self, holder: str | Holder, amount: int = 0) -> Spending:
        """Return what counts a tenant's units, from ``amount`` on; raises the error of ``check``."""
        spending = Spending(self, _holder(holder))
        spending.add(amount)
        return spending

    def count(self, holder: Holder, amount: int) -> None:
        """Change the usage without a check; for ``Spending``, which ends it exactly once."""
        for name in ("", *holder.names):
            self._used[name] += amount
            if not self._used[name]:
                del self._used[name]


class Spending:
    """Units that are in use until ``close``, which is idempotent, or the end of the block."""

    def __init__(self, limit: Limit, holder: Holder) -> None:
        self._limit = limit
        self.holder = holder
        self.amount = 0

    def add(self, amount: int, *, may_exceed: bool = False) -> None:
        """Use more units; raises the limit's error, and counts nothing then, unless it ``may_exceed``."""
        if amount and not may_exceed:
            self._limit.check(self.holder, amount)
        self._limit.count(self.holder, amount)
        self.amount += amount

    def release(self, amount: int) -> None:
        """Use fewer units: at most those that are in use."""
        amount = min(amount, self.amount)
        self.amount -= amount
        self._limit.count(self.holder, -amount)

    def close(self) -> None:
        self.release(self.amount)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _holder(holder: str | Holder) -> Holder:
    return Holder(holder) if isinstance(holder, str) else holder


class ThrottledError(ApiError):
    """A request beyond its caller's limits; its headers are ``Retry-After`` and OpenAI's rate limits."""

    def __init__(self, message: str, headers: dict[str, str]) -> None:
        super().__init__(ErrorCode.RATE_LIMITED, message)
        self.headers = headers
