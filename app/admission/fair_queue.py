"""A fair queue: senders take turns, so that a sender of many items delays only its own.

Used before resources that serve one item at a time, such as the local engine.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue of items by sender; one item of each sender in turn."""

    def __init__(self) -> None:
        self._senders: OrderedDict[str, deque[T]] = OrderedDict()
        self._item_added = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return sum(map(len, self._senders.values()))

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items in the order in which they will be taken if no others arrive."""
        left = [list(items) for items in self._senders.values()]
        for turn in range(max(map(len, left), default=0)):
            yield from (items[turn] for items in left if turn < len(items))

    def add(self, sender: str, item: T) -> None:
        """Append an item to the sender's queue."""
        self._senders.setdefault(sender, deque()).append(item)
        self._item_added.set()

    def remove(self, item: T) -> bool:
        """Remove an item; return False if it was not waiting."""
        for sender, items in self._senders.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._senders[sender]
                return True
        return False

    async def take(self) -> T:
        """Wait for an item, remove the next one and return it."""
        while (item := self.pop()) is None:
            self._item_added.clear()
            await self._item_added.wait()
        return item

    def pop(self, may: Callable[[str], bool] = lambda _: True) -> T | None:
        """Remove and return the next item among the allowed senders; None if there is none.

        Args:
            may: Returns whether an item of this sender may be taken now.
        """
        sender = next(filter(may, self._senders), None)
        if sender is None:
            return None
        items = self._senders.pop(sender)
        item = items.popleft()
        if items:
            self._senders[sender] = items  # behind all other senders
        return item

    def num_of(self, sender: str) -> int:
        """Return the number of a sender's waiting items."""
        return len(self._senders.get(sender, ()))
