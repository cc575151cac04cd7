"""Rates and concurrency of keys and tenants: a request is let in, or told when to come back.

Counting is ``limits``'s, in memory or, for several servers together, in what its URL names (Redis); what runs
at once is counted by each server for itself. Whoever has no limits costs nothing. The dependency that reads
keys calls ``admit``; the outermost middleware sends the headers of what it gave, and releases it after the
response's last byte.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Final

from limits import RateLimitItemPerMinute
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import ConfigurationError
from limits.storage import storage_from_string

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Limits
from app.auth.principal import Principal
from nnsight_engine.core.errors import UnsupportedOptionError

ADMITTED: Final = "nnsight_engine.admitted"
"""Where a request's ASGI scope keeps its ``Admitted``."""
_SOON_S: Final = 1
_REMAINING: Final = "x-ratelimit-remaining-requests"


class ThrottledError(ApiError):
    """A request beyond its caller's limits.

    Attributes:
        headers: When to come back, and OpenAI's headers of what is left.
    """

    def __init__(self, message: str, headers: dict[str, str]) -> None:
        """Keep both."""
        super().__init__(ErrorCode.RATE_LIMITED, message)
        self.headers = headers


@dataclasses.dataclass(slots=True)
class Admitted:
    """A request that was let in.

    Attributes:
        headers: What is left to its caller, as OpenAI says it.
    """

    headers: dict[str, str]
    _release: Callable[[], None] | None = None

    def release(self) -> None:
        """Say that the response is over; harmless when repeated."""
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Whose requests are counted together: those of a key, or of all keys of a tenant."""

    name: str
    said: str
    limits: Limits


class Rates:
    """Counts requests of one server, or of several that share a storage.

    Args:
        url: Where counts are kept, as ``limits`` has it: ``memory://``, ``redis://host:6379``.
    """

    def __init__(self, url: str) -> None:
        """Open the storage.

        Raises:
            UnsupportedOptionError: It names none that is known here, or one whose client is not installed.
        """
        try:
            storage = storage_from_string(f"async+{url}")
        except ConfigurationError as error:
            # Its own words may hold the URL's password.
            raise UnsupportedOptionError(
                f"NNSIGHT_ENGINE_LIMITS_URL begins with {url.partition(':')[0]!r}, where counts cannot be "
                f"kept ({type(error).__name__}): memory:// will do, and redis://… with the package coredis"
            ) from None
        self._limiter = SlidingWindowCounterRateLimiter(storage)
        self._running: collections.Counter[str] = collections.Counter()

    async def admit(self, caller: Principal, *, works: bool) -> Admitted | None:
        """Count a request; None for a caller without limits.

        Args:
            caller: Who sends it.
            works: Whether it is one of those that run at once, which concurrency is of.

        Raises:
            ThrottledError: It is beyond what its key or its tenant may.
        """
        groups = [
            group
            for group in (
                _Group(f"key:{caller.key_id}", f"the key {caller.key_id!r}", caller.limits),
                _Group(f"tenant:{caller.tenant}", f"the tenant {caller.tenant!r}", caller.tenant_limits),
            )
            if group.limits.model_fields_set
        ]
        if not groups:
            return None
        if works:
            self._check_running(groups)
        for group in groups:
            await self._check_rate(group)
        # Nobody else's turn has come since the check but those that waited for the storage: look again.
        names = [group.name for group in groups] if works else []
        self._check_running(groups if works else [])
        self._running.update(names)
        try:
            told = [await self._count(group) for group in groups]
        except BaseException:
            self._end(names)
            raise
        least = min(filter(None, told), key=lambda headers: int(headers[_REMAINING]), default={})
        return Admitted(least, lambda: self._end(names))

    def _check_running(self, groups: list[_Group]) -> None:
        for group in groups:
            most = group.limits.concurrency
            if most is not None and self._running[group.name] >= most:
                raise ThrottledError(
                    f"Requests of {group.said} may run {most} at once, and as many do: send this one again "
                    "when one of them has ended.",
                    {"Retry-After": str(_SOON_S)},
                )

    def _end(self, names: list[str]) -> None:
        self._running.subtract(names)
        for name in names:
            if self._running[name] <= 0:
                del self._running[name]

    async def _check_rate(self, group: _Group) -> None:
        most = group.limits.requests_per_minute
        if most is not None and not await self._limiter.test(RateLimitItemPerMinute(most), group.name):
            raise await self._beyond(group, most)

    async def _count(self, group: _Group) -> dict[str, str]:
        """Count a request of a group, and return what its caller is told."""
        most = group.limits.requests_per_minute
        if most is None:
            return {}
        if not await self._limiter.hit(RateLimitItemPerMinute(most), group.name):
            raise await self._beyond(group, most)
        return await self._left(group, most)

    async def _beyond(self, group: _Group, most: int) -> ThrottledError:
        headers = await self._left(group, most)
        wait = headers["x-ratelimit-reset-requests"].removesuffix("s")
        return ThrottledError(
            f"{group.said[0].upper()}{group.said[1:]} may send {most} requests a minute, and has: send this "
            f"one again in {wait} s.",
            {**headers, "Retry-After": wait},
        )

    async def _left(self, group: _Group, most: int) -> dict[str, str]:
        stats = await self._limiter.get_window_stats(RateLimitItemPerMinute(most), group.name)
        return {
            "x-ratelimit-limit-requests": str(most),
            _REMAINING: str(max(0, stats.remaining)),
            "x-ratelimit-reset-requests": f"{max(_SOON_S, math.ceil(stats.reset_time - time.time()))}s",
        }


__all__ = ["ADMITTED", "Admitted", "Rates", "ThrottledError"]
