"""A fair queue: senders take turns, so that a sender of many items delays only its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

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
