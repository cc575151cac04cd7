"""How many jobs run at once, and which kinds of them wait for an engine whose own queue is full.

A job that waits for its engine takes no place from those of other engines. As long as it waits no more of its
kind are claimed: they would only wait with it, out of their turn. ``JobDispatcher`` owns the one instance.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from app.storage.job_leases import JobKind


class JobSlots:
    """The places of the jobs that run.

    Args:
        max_running: How many there are.
        changed: Called when jobs may be claimed that could not be before.
    """

    def __init__(self, max_running: int, changed: Callable[[], None]) -> None:
        """All are free."""
        self._places = asyncio.Semaphore(max_running)
        self._changed = changed
        self._waiting: Counter[JobKind] = Counter()

    @property
    def are_taken(self) -> bool:
        """Whether there is no place, or one only for jobs that wait for one already."""
        return self._places.locked()

    @property
    def waiting(self) -> list[JobKind]:
        """The kinds of jobs that wait for their engine."""
        return list(self._waiting)

    async def take(self) -> JobSlot:
        """Take a place; at once unless they ``are_taken``."""
        await self._places.acquire()
        return JobSlot(self._places, self._waiting, self._changed)


class JobSlot:
    """A job's place, which it has, or has left while its engine has no room."""

    def __init__(
        self, places: asyncio.Semaphore, waiting: Counter[JobKind], changed: Callable[[], None]
    ) -> None:
        """Take over a place that was taken."""
        self._places = places
        self._waiting = waiting
        self._changed = changed
        self._is_held = True
        self._waits_for: JobKind | None = None

    async def wait(self, kind: JobKind, delay_s: float) -> None:
        """Leave the place, come back later: the engine has no room for a job of this kind."""
        if self._waits_for is None:
            self._waits_for = kind
            self._waiting[kind] += 1
        self._release()
        self._changed()
        await asyncio.sleep(delay_s)
        await self._places.acquire()
        self._is_held = True

    def accepted(self) -> None:
        """Let more of the job's kind be claimed: its engine has taken it, or it has ended."""
        kind, self._waits_for = self._waits_for, None
        if kind is not None:
            self._waiting[kind] -= 1
            if not self._waiting[kind]:
                del self._waiting[kind]
            self._changed()

    def leave(self) -> None:
        """Give the place up for good; harmless when repeated."""
        self._release()
        self.accepted()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._places.release()


__all__ = ["JobSlot", "JobSlots"]
