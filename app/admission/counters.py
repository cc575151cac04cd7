"""Counters over a sliding minute, in memory or in a storage that several servers share.

If the shared storage does not respond in time, this server counts in its own memory and retries after a
pause: limits then hold per server. Errors of the storage never reach a request.
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
_RETENTION_S: Final = 3 * _MINUTE_S
_TIMEOUT_S: Final = 0.5
"""How long a request waits for the shared storage."""
_RETRY_DELAY_S: Final = 5.0
"""How long a storage that failed is not used; then one request tries it again."""
_MEMORY: Final = "memory://"
MAX_CARRIED_MINUTES: Final = 60
"""Usage beyond this number of minutes is dropped, so that one accident does not lock a key out for days."""


@dataclasses.dataclass(frozen=True, slots=True)
class Used:
    """Usage within a sliding minute; ``left`` is the fraction of ``before`` that still counts, 1 to 0.

    ``later`` is the usage that is already carried over to each of the minutes after this one.
    """

    before: int
    now: int
    left: float
    later: tuple[int, ...] = ()

    @property
    def amount(self) -> int:
        return max(0, int(self.before * self.left) + self.now)

    def wait_s(self, room: int) -> int:
        """Return the seconds, at least one, until at most ``room`` of the usage counts."""
        if self.amount <= room:
            return 1
        room, before = max(0, room), self.before
        minutes = 0.0  # from the beginning of the current one
        for index, now in enumerate((self.now, *self.later, 0)):
            if now <= room:  # at some moment of this minute, enough of the previous minute has expired
                minutes = index + 1 - min(1.0, (room - now) / max(1, before))
                break
            before = now
        return max(1, math.ceil((minutes - (1 - self.left)) * _MINUTE_S))


class _Backend:
    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.limiter = SlidingWindowCounterRateLimiter(storage)


_Query = Callable[[_Backend], Awaitable[T]]


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """``name`` is what is counted, ``minute`` the number of the minute that it counts in."""

    name: str
    amount: int
    minute: int
    backend: _Backend


class Counts:
    """Counts by names; each call goes to the shared storage or, while that fails, to this process."""

    def __init__(self, url: str) -> None:
        """Raise UnsupportedOptionError for an unknown scheme or a missing client library."""
        self.num_failures = 0
        self._local = _Backend(MemoryStorage())
        self._shared = None if url == _MEMORY else _Backend(_opened(url))
        self._retry_at = 0.0

    async def hit(self, item: RateLimitItem, name: str) -> bool:
        """Count one hit unless that exceeds the limit; return whether it was counted."""
        return await self._query(lambda backend: backend.limiter.hit(item, name))

    async def test(self, item: RateLimitItem, name: str) -> bool:
        return await self._query(lambda backend: backend.limiter.test(item, name))

    async def stats(self, item: RateLimitItem, name: str) -> WindowStats:
        return await self._query(lambda backend: backend.limiter.get_window_stats(item, name))

    async def used(self, name: str, *, ahead: bool = False) -> Used:
        """Return the usage; ``later`` is read only if ``ahead``."""
        return await self._query(lambda backend: _used(backend.storage, name, ahead=ahead))

    async def add(self, name: str, amount: int, most: int) -> None:
        """Add to the usage; the part beyond ``most`` per minute is carried over to the following minutes."""
        await self._query(lambda backend: _add(backend.storage, name, amount, most))

    async def reserve(self, name: str, amount: int) -> tuple[Reservation, Used]:
        """Reserve an amount regardless of limits; return the reservation and the resulting usage."""

        async def query(backend: _Backend) -> tuple[Reservation, Used]:
            minute = this_minute()
            await backend.storage.incr(_bucket(name, minute), _RETENTION_S, amount)
            return Reservation(name, amount, minute, backend), await _used(backend.storage, name)

        return await self._query(query)

    async def release(self, reservation: Reservation, amount: int) -> None:
        """Release part of a reservation; without an effect if its minute no longer counts."""
        if reservation.minute < this_minute() - 1 or amount <= 0:
            return
        storage, bucket = reservation.backend.storage, _bucket(reservation.name, reservation.minute)

        async def query() -> None:
            left = await storage.incr(bucket, _RETENTION_S, -amount)
            if left < 0:  # the storage has lost the reservation
                await storage.incr(bucket, _RETENTION_S, -left)

        if reservation.backend is self._local:
            await query()
        else:
            await self._query(lambda backend: query() if backend is reservation.backend else _nothing())

    async def _query(self, query: _Query[T]) -> T:
        """Return the answer of the shared storage or, while it does not answer, of this process's own."""
        shared = self._shared
        if shared is None or time.monotonic() < self._retry_at:
            return await query(self._local)
        if self._retry_at:  # while one request retries a failed storage, others do not wait for it
            self._retry_at = time.monotonic() + _RETRY_DELAY_S
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await query(shared)
        except Exception as error:  # noqa: BLE001 - whatever clients of storages raise
            self._retry_at = time.monotonic() + _RETRY_DELAY_S
            self.num_failures += 1
            # Its message may contain the URL's password.
            logger.warning(
                "the storage at NNSIGHT_ENGINE_LIMITS_URL does not answer (%s, %d failures so far); this "
                "server counts its limits alone for now", type(error).__name__, self.num_failures,
            )  # fmt: skip
            return await query(self._local)
        if self._retry_at:
            logger.warning("the storage at NNSIGHT_ENGINE_LIMITS_URL answers again; limits are shared")
            self._retry_at = 0.0
        return answer


def this_minute() -> int:
    return int(time.time() // _MINUTE_S)


async def _used(storage: Storage, name: str, *, ahead: bool = False) -> Used:
    """Return the usage of this minute and the last one, and with ``ahead`` of those after it."""
    minute, passed = divmod(time.time(), _MINUTE_S)
    before = await storage.get(_bucket(name, int(minute) - 1))
    now = await storage.get(_bucket(name, int(minute)))
    later: list[int] = []
    while ahead and len(later) < MAX_CARRIED_MINUTES:
        following = await storage.get(_bucket(name, int(minute) + 1 + len(later)))
        if not following:
            break
        later.append(following)
    return Used(before, now, 1 - passed / _MINUTE_S, tuple(later))


async def _add(storage: Storage, name: str, amount: int, most: int) -> None:
    """Count at most ``most`` in each minute, and what is beyond in the minutes after it."""
    minute = this_minute()
    for later in range(MAX_CARRIED_MINUTES + 1):
        bucket, retention_s = _bucket(name, minute + later), _RETENTION_S + later * _MINUTE_S
        beyond = min(amount, await storage.incr(bucket, retention_s, amount) - most)
        if beyond <= 0:
            return
        await storage.incr(bucket, retention_s, -beyond)
        amount = beyond


async def _nothing() -> None:
    pass


def _bucket(name: str, minute: int) -> str:
    return f"nnsight-engine/{name}/{minute}"


def _opened(url: str) -> Storage:
    try:
        # Of the client libraries for Redis, select the official one.
        options = {"implementation": "redispy"} if url.startswith("redis") else {}
        storage = storage_from_string(f"async+{url}", **options)
    except ConfigurationError as error:
        # Its message may contain the URL's password.
        raise UnsupportedOptionError(
            "NNSIGHT_ENGINE_LIMITS_URL must name a storage for counts, got the scheme "
            f"{url.partition(':')[0]!r} ({type(error).__name__}); use memory://, or redis://… with the "
            "package redis"
        ) from None
    assert isinstance(storage, Storage)  # noqa: S101 - of an asynchronous URL
    return storage
