"""A pool of slots for a limited resource, such as sandboxes, with a fair, bounded queue.

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

from app.limits.allowances import Allowance

T = TypeVar("T")


class FairQueue(Generic[T]):
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


class SlotPool:
    def __init__(self, slots: Allowance, waiting: Allowance) -> None:
        self._slots = slots
        self._waiting = waiting
        self._taken: Counter[str] = Counter()
        self._queue: FairQueue[Slot] = FairQueue()
        self._groups: dict[str, Counter[Hashable]] = {}

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._groups.values()))

    def request(self, tenant: str, group: Hashable, *, may_exceed_queue: bool = False) -> Slot:
        """Request a slot, to be released in any case; raises ApiError ``queue_full``.

        ``group`` identifies the slots of one request. No share applies to an empty ``tenant``.
        """
        must_wait = self._queue.num_of(tenant) or not self._is_within_share(tenant) or not self._is_any_free
        if must_wait and not may_exceed_queue and group not in self._groups.get(tenant, ()):
            self._waiting.check(tenant, len(self._groups.get(tenant, ())))
            self._waiting.check_total(self.num_waiting)
        slot = Slot(self, tenant, group)
        self._groups.setdefault(tenant, Counter())[group] += 1
        self._queue.add(tenant, slot)
        self._grant()
        return slot

    def release(self, slot: Slot) -> None:
        """Release a slot, or remove it from the queue; ``Slot.release`` calls this once."""
        if slot.is_granted:
            self._taken[slot.tenant] -= 1
            self._grant()
        elif self._queue.remove(slot):
            self._forget(slot)

    def _is_within_share(self, tenant: str) -> bool:
        return self._slots.permits(tenant, self._taken[tenant])

    @property
    def _is_any_free(self) -> bool:
        return self._slots.has_room(self._taken.total())

    def _grant(self) -> None:
        while self._is_any_free:
            slot = self._queue.pop(self._is_within_share)
            if slot is None:
                return
            self._taken[slot.tenant] += 1
            self._forget(slot)
            slot.grant()

    def _forget(self, slot: Slot) -> None:
        groups = self._groups[slot.tenant]
        groups[slot.group] -= 1
        if not groups[slot.group]:
            del groups[slot.group]
        if not groups:
            del self._groups[slot.tenant]


class Slot:
    """A requested slot; as an async context manager, held for the length of the block."""

    def __init__(self, pool: SlotPool, tenant: str, group: Hashable) -> None:
        self.tenant = tenant
        self.group = group
        self._pool: SlotPool | None = pool
        self._granted = asyncio.Event()

    @property
    def is_granted(self) -> bool:
        return self._granted.is_set()

    def grant(self) -> None:
        self._granted.set()

    async def wait_granted(self) -> None:
        await self._granted.wait()

    def release(self) -> None:
        """Release the slot, or stop waiting for it; idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.release(self)

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
