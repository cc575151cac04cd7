"""Counts over a sliding minute, in memory or in a storage that several servers share, which may be away.

Counting is ``limits``'s. Where the shared storage does not answer in time, or at all, this server goes on
counting by itself, in memory, and asks it again after a pause: limits hold meanwhile, for each server alone,
and nobody waits. Whatever is wrong with the storage never reaches a request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from limits import RateLimitItem, WindowStats
from limits.aio.storage import MemoryStorage, Storage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import ConfigurationError
from limits.storage import storage_from_string

from nnsight_engine.core.errors import UnsupportedOptionError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MINUTE_S: Final = 60
_PATIENCE_S: Final = 0.5
"""What a request waits for the shared storage."""
_PAUSE_S: Final = 5.0
"""How long a storage that has failed is left alone; then one request asks it again."""
_MEMORY: Final = "memory://"


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """What was used of something within a sliding minute.

    Attributes:
        before: In the last minute of the clock.
        now: In this one.
        left: The part of the last one that still counts, from 1 down to 0 as this one goes by.
    """

    before: int
    now: int
    left: float

    @property
    def amount(self) -> int:
        """How much that is."""
        return max(0, int(self.before * self.left) + self.now)

    def wait_s(self, room: int) -> int:
        """Return in how many seconds no more than ``room`` of it will count, at least one."""
        if self.amount <= room:
            return 1
        if self.now <= room:
            left = (room - self.now) / max(1, self.before)
            return max(1, math.ceil((self.left - left) * _MINUTE_S))
        left = max(0, room) / max(1, self.now)
        return max(1, math.ceil((self.left + 1 - left) * _MINUTE_S))


class _Side:
    """A storage and what counts in it."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.limiter = SlidingWindowCounterRateLimiter(storage)


_Ask = Callable[[_Side], Awaitable[T]]


class Counts:
    """Counts of one server, or of several that share a storage.

    Args:
        url: Where they are kept, as ``limits`` has it: ``memory://``, ``redis://host:6379``.

    Attributes:
        num_failures: How often the shared storage has failed.
    """

    def __init__(self, url: str) -> None:
        """Open the storage, which connects when it is first asked.

        Raises:
            UnsupportedOptionError: It names none that is known here, or one whose client is not installed.
        """
        self.num_failures = 0
        self._own = _Side(MemoryStorage())
        self._shared = None if url == _MEMORY else _Side(_opened(url))
        self._again_at = 0.0

    async def hit(self, item: RateLimitItem, name: str) -> bool:
        """Count one of something, unless that is one too many; returns whether it was counted."""
        return await self._ask(lambda side: side.limiter.hit(item, name))

    async def test(self, item: RateLimitItem, name: str) -> bool:
        """Tell whether one more would be counted."""
        return await self._ask(lambda side: side.limiter.test(item, name))

    async def stats(self, item: RateLimitItem, name: str) -> WindowStats:
        """Return how many more would be, and when that changes."""
        return await self._ask(lambda side: side.limiter.get_window_stats(item, name))

    async def used(self, name: str) -> Used:
        """Return how much was used of something."""
        return await self._ask(lambda side: _used(side.storage, name))

    async def add(self, name: str, amount: int, minute: int | None = None) -> Used:
        """Add to what was used, beyond whatever limit; returns how much it is then.

        Args:
            name: Of what.
            amount: How much; less than nothing gives back what was added before.
            minute: When it was added that is given back; too late for it, nothing changes.
        """
        return await self._ask(lambda side: _added(side.storage, name, amount, minute))

    async def _ask(self, ask: _Ask[T]) -> T:
        shared = self._shared
        if shared is None or time.monotonic() < self._again_at:
            return await ask(self._own)
        if self._again_at:  # it has failed: others need not wait for it too
            self._again_at = time.monotonic() + _PAUSE_S
        try:
            async with asyncio.timeout(_PATIENCE_S):
                answer = await ask(shared)
        except Exception as error:  # noqa: BLE001 - whatever clients of storages raise
            self._again_at = time.monotonic() + _PAUSE_S
            self.num_failures += 1
            # Its own words may hold the URL's password.
            logger.warning(
                "limits are counted by this server alone for now, where NNSIGHT_ENGINE_LIMITS_URL leads does "
                "not answer (%s, %d times so far)", type(error).__name__, self.num_failures,
            )  # fmt: skip
            return await ask(self._own)
        if self._again_at:
            logger.warning("limits are counted together again")
            self._again_at = 0.0
        return answer


def this_minute() -> int:
    """Return the clock's minute, as ``Counts.add`` takes it."""
    return int(time.time() // _MINUTE_S)


async def _used(storage: Storage, name: str) -> Used:
    minute, passed = divmod(time.time(), _MINUTE_S)
    before = await storage.get(_bucket(name, int(minute) - 1))
    now = await storage.get(_bucket(name, int(minute)))
    return Used(before, now, 1 - passed / _MINUTE_S)


async def _added(storage: Storage, name: str, amount: int, minute: int | None) -> Used:
    now = this_minute()
    at = now if minute is None else minute
    if amount and at >= now - 1:
        await storage.incr(_bucket(name, at), 3 * _MINUTE_S, amount)
    return await _used(storage, name)


def _bucket(name: str, minute: int) -> str:
    return f"nnsight-engine/{name}/{minute}"


def _opened(url: str) -> Storage:
    try:
        # Of the clients of Redis, the one that is its own.
        options = {"implementation": "redispy"} if url.startswith("redis") else {}
        storage = storage_from_string(f"async+{url}", **options)
    except ConfigurationError as error:
        # Its own words may hold the URL's password.
        raise UnsupportedOptionError(
            f"NNSIGHT_ENGINE_LIMITS_URL begins with {url.partition(':')[0]!r}, where counts cannot be "
            f"kept ({type(error).__name__}): memory:// will do, and redis://… with the package redis"
        ) from None
    assert isinstance(storage, Storage)  # noqa: S101 - of an asynchronous URL
    return storage


__all__ = ["Counts", "Used", "this_minute"]
