"""Slots of a limited resource, such as sandboxes, with a fair, bounded queue.

Tenants take turns, so that a tenant with many requests delays only its own. Each is limited to its share of
the slots and of the queue. Without keys there is one tenant, with the empty name, which may use everything. A
request that needs several slots at once is a *group* and counts as one in the queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from app.limits.limit import Limit, Spending

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue whose senders take turns: one item of each, in the order of their arrival."""

    def __init__(self) -> None:
        self._senders: OrderedDict[str, deque[T]] = OrderedDict()
        self._item_added = asyncio.Event()

    def __len__(self) -> int:
        return sum(map(len, self._senders.values()))

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items in the order in which they will be taken if no others arrive."""
        left = [list(items) for items in self._senders.values()]
        for turn in range(max(map(len, left), default=0)):
            yield from (items[turn] for items in left if turn < len(items))

    def add(self, sender: str, item: T) -> None:
        self._senders.setdefault(sender, deque()).append(item)
        self._item_added.set()

    def remove(self, item: T) -> bool:
        """Return False if the item was not waiting."""
        for sender, items in self._senders.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._senders[sender]
                return True
        return False

    async def take(self) -> T:
        while (item := self.pop()) is None:
            self._item_added.clear()
            await self._item_added.wait()
        return item

    def pop(self, may: Callable[[str], bool] = lambda _: True) -> T | None:
        """Remove and return the next item of the senders that ``may`` allows now; None if there is none."""
        sender = next(filter(may, self._senders), None)
        if sender is None:
            return None
        items = self._senders.pop(sender)
        item = items.popleft()
        if items:
            self._senders[sender] = items  # behind all other senders
        return item

    def num_of(self, sender: str) -> int:
        return len(self._senders.get(sender, ()))


class Slots:
    """A limit whose spenders wait in a queue; ``waiting`` limits the queue, None for no limit."""

    def __init__(self, limit: Limit, waiting: Limit | None = None) -> None:
        self._limit = limit
        self._waiting = waiting
        self._queue: FairQueue[Slot] = FairQueue()
        self._groups: dict[str, Counter[Hashable]] = {}

    @property
    def num_waiting(self) -> int:
        return self._num_waiting_of("")

    def request(self, tenant: str, group: Hashable | None = None, *, may_exceed_queue: bool = False) -> Slot:
        """Request a slot, to be released in any case; raises ApiError ``queue_full``.

        ``group`` identifies the slots of one request, if it needs several. No share applies to an empty
        ``tenant``.
        """
        slot = Slot(self, tenant, object() if group is None else group)
        must_wait = self._queue.num_of(tenant) or not self._limit.has_room(tenant)
        may_join = may_exceed_queue or slot.group in self._groups.get(tenant, ())
        if self._waiting is not None and must_wait and not may_join:
            self._waiting.check(tenant, used=self._num_waiting_of)
        self._groups.setdefault(tenant, Counter())[slot.group] += 1
        self._queue.add(tenant, slot)
        self._grant()
        return slot

    def release(self, slot: Slot) -> None:
        """Release a slot, or remove it from the queue; idempotent."""
        if slot.spending is not None:
            slot.spending.close()
            self._grant()
        elif self._queue.remove(slot):
            self._forget(slot)

    def _num_waiting_of(self, tenant: str) -> int:
        """Return how many requests of a tenant, or of all for the empty name, wait: groups count once."""
        return len(self._groups.get(tenant, ())) if tenant else sum(map(len, self._groups.values()))

    def _grant(self) -> None:
        """Give free slots to those who wait, in turn."""
        while (slot := self._queue.pop(self._limit.has_room)) is not None:
            self._forget(slot)
            slot.grant(self._limit.spend(slot.tenant, 1))

    def _forget(self, slot: Slot) -> None:
        """Count a slot no longer as waiting: it is granted, or was given up."""
        groups = self._groups[slot.tenant]
        groups[slot.group] -= 1
        if not groups[slot.group]:
            del groups[slot.group]
        if not groups:
            del self._groups[slot.tenant]


class Slot:
    """A requested slot; as an async context manager, held for the length of the block."""

    def __init__(self, slots: Slots, tenant: str, group: Hashable) -> None:
        self.tenant = tenant
        self.group = group
        self.spending: Spending | None = None
        self._slots = slots
        self._granted = asyncio.Event()

    @property
    def is_granted(self) -> bool:
        return self.spending is not None

    def grant(self, spending: Spending) -> None:
        self.spending = spending
        self._granted.set()

    async def wait_granted(self) -> None:
        await self._granted.wait()

    def release(self) -> None:
        """Release the slot, or stop waiting for it; idempotent."""
        self._slots.release(self)

    async def __aenter__(self) -> None:
        """Wait for the slot; leave it if the wait is cancelled."""
        try:
            await self.wait_granted()
        except BaseException:
            self.release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
