"""The number of jobs that run at once, and the kinds of jobs that wait for an engine whose queue is full.

A job that waits for its engine uses no slot. While it waits, no more jobs of its kind are claimed: they would
only wait with it, out of order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from app.storage.jobs.leases import JobKind


class JobSlots:
    """The slots of running jobs; ``changed`` is called when more jobs may be claimed than before."""

    def __init__(self, max_running: int, changed: Callable[[], None]) -> None:
        self._slots = asyncio.Semaphore(max_running)
        self._changed = changed
        self._waiting: Counter[JobKind] = Counter()

    @property
    def are_taken(self) -> bool:
        """Whether no slot is free, or free ones go to jobs that already wait for one."""
        return self._slots.locked()

    @property
    def waiting(self) -> list[JobKind]:
        return list(self._waiting)

    async def take(self) -> JobSlot:
        await self._slots.acquire()
        return JobSlot(self._slots, self._waiting, self._changed)


class JobSlot:
    def __init__(
        self, slots: asyncio.Semaphore, waiting: Counter[JobKind], changed: Callable[[], None]
    ) -> None:
        self._slots = slots
        self._waiting = waiting
        self._changed = changed
        self._is_held = True
        self._waits_for: JobKind | None = None

    async def wait(self, kind: JobKind, delay_s: float) -> None:
        """Release the slot and acquire one after a delay, while the engine has no room for this kind."""
        if self._waits_for is None:
            self._waits_for = kind
            self._waiting[kind] += 1
        self._release()
        self._changed()
        await asyncio.sleep(delay_s)
        await self._slots.acquire()
        self._is_held = True

    def accepted(self) -> None:
        """Allow more jobs of this kind to be claimed: the engine has accepted this one, or it has ended."""
        kind, self._waits_for = self._waits_for, None
        if kind is not None:
            self._waiting[kind] -= 1
            if not self._waiting[kind]:
                del self._waiting[kind]
            self._changed()

    def release(self) -> None:
        """Release the slot for good; idempotent."""
        self._release()
        self.accepted()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._slots.release()
