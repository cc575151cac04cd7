"""Places of what only so much of runs at once, such as sandboxes: whose turn it is, and how many may wait.

Tenants take turns, and none has more than its share of the places, or of those who wait, so that whoever
has filled theirs keeps nobody else waiting. Without keys there is one tenant, of no name, which has all. What
asks for several places at once, as a completion of many prompts does, is a *group* and waits as one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Hashable
from types import TracebackType

from api_schemas.errors import ApiError, ErrorCode
from app.engine.fair_queue import FairQueue


class SlotPool:
    """Some places, and who waits for one.

    Args:
        num: How many there are.
        max_waiting: Most groups that wait.
        share: The part of both which one tenant may have.
        what: What wants one, for messages: ``trainings``.
    """

    def __init__(self, num: int, *, max_waiting: int, share: float, what: str) -> None:
        """All are free."""
        self._num = num
        self._most = math.ceil(num * share)
        self._max_waiting = max_waiting
        self._max_waiting_each = math.ceil(max_waiting * share)
        self._what = what
        self._taken: Counter[str] = Counter()
        self._queue: FairQueue[Slot] = FairQueue()
        self._groups: dict[str, Counter[Hashable]] = {}

    @property
    def num_waiting(self) -> int:
        """How many groups wait."""
        return sum(map(len, self._groups.values()))

    def ask(self, tenant: str, group: Hashable, *, is_patient: bool = False) -> Slot:
        """Ask for a place, to be awaited, and left whatever happens.

        Args:
            tenant: Whose share it is of; nobody's if empty.
            group: What it is for, together with others.
            is_patient: Whether it waits however many do already.

        Raises:
            ApiError: ``queue_full``.
        """
        must_wait = self._queue.num_of(tenant) or not self._may(tenant) or self._taken.total() >= self._num
        if must_wait and not is_patient and group not in self._groups.get(tenant, ()):
            self._check_waiting(tenant)
        place = Slot(self, tenant, group)
        self._groups.setdefault(tenant, Counter())[group] += 1
        self._queue.add(tenant, place)
        self._grant()
        return place

    def leave(self, place: Slot) -> None:
        """Take a place back, or let it wait no more; ``Slot.leave`` calls this, once."""
        if place.is_granted:
            self._taken[place.tenant] -= 1
            self._grant()
        elif self._queue.remove(place):
            self._forget(place)

    def _check_waiting(self, tenant: str) -> None:
        others = len(self._groups.get(tenant, ()))
        if tenant and others >= self._max_waiting_each:
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                f"{others} {self._what} of the tenant {tenant!r} wait already, and no more may; send this "
                "one again later.",
            )
        if self.num_waiting >= self._max_waiting:
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                f"{self.num_waiting} {self._what} wait already, and no more may; send this one again later.",
            )

    def _may(self, tenant: str) -> bool:
        return not tenant or self._taken[tenant] < self._most

    def _grant(self) -> None:
        while self._taken.total() < self._num:
            place = self._queue.pop(self._may)
            if place is None:
                return
            self._taken[place.tenant] += 1
            self._forget(place)
            place.grant()

    def _forget(self, place: Slot) -> None:
        """Count a place no more that has waited."""
        groups = self._groups[place.tenant]
        groups[place.group] -= 1
        if not groups[place.group]:
            del groups[place.group]
        if not groups:
            del self._groups[place.tenant]


class Slot:
    """A place that was asked for; as a context, had for the length of the block.

    Attributes:
        tenant: Whose share it is of.
        group: What it is for.
    """

    def __init__(self, places: SlotPool, tenant: str, group: Hashable) -> None:
        """Wait; ``SlotPool`` makes them."""
        self.tenant = tenant
        self.group = group
        self._places: SlotPool | None = places
        self._granted = asyncio.Event()

    @property
    def is_granted(self) -> bool:
        """Whether it need not wait."""
        return self._granted.is_set()

    def grant(self) -> None:
        """Let it wait no more."""
        self._granted.set()

    async def taken(self) -> None:
        """Wait for it."""
        await self._granted.wait()

    def leave(self) -> None:
        """Give it to whoever is next; harmless when repeated."""
        places, self._places = self._places, None
        if places is not None:
            places.leave(self)

    async def __aenter__(self) -> None:
        """Wait for it; who gives up waiting has left it."""
        try:
            await self.taken()
        except BaseException:
            self.leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it."""
        self.leave()


__all__ = ["Slot", "SlotPool"]
