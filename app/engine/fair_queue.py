"""Who is next: one of each sender in turn, so that whoever sends many waits for their own.

One queue stands before something that takes one at a time, such as the local engine.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Waiting items, by sender."""

    def __init__(self) -> None:
        """Start empty."""
        self._senders: OrderedDict[str, deque[T]] = OrderedDict()
        self._come = asyncio.Event()

    def __len__(self) -> int:
        """Return how many wait."""
        return sum(map(len, self._senders.values()))

    def __iter__(self) -> Iterator[T]:
        """Iterate over them in the order in which they will be taken, should nobody else come."""
        left = [list(items) for items in self._senders.values()]
        for turn in range(max(map(len, left), default=0)):
            yield from (items[turn] for items in left if turn < len(items))

    def add(self, sender: str, item: T) -> None:
        """Add an item behind the sender's own."""
        self._senders.setdefault(sender, deque()).append(item)
        self._come.set()

    def remove(self, item: T) -> bool:
        """Take an item out that need not wait any more; False if it does not wait."""
        for sender, items in self._senders.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._senders[sender]
                return True
        return False

    async def take(self) -> T:
        """Wait for an item, and take the one whose turn it is."""
        while (item := self.pop()) is None:
            self._come.clear()
            await self._come.wait()
        return item

    def pop(self, may: Callable[[str], bool] = lambda _: True) -> T | None:
        """Take the item out whose turn it is, of those senders who may have one; None where none waits."""
        sender = next(filter(may, self._senders), None)
        if sender is None:
            return None
        items = self._senders.pop(sender)
        item = items.popleft()
        if items:
            self._senders[sender] = items  # behind everybody else
        return item

    def num_of(self, sender: str) -> int:
        """Return how many of a sender's wait."""
        return len(self._senders.get(sender, ()))
