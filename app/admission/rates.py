"""Rate limits of keys and tenants: admits or rejects requests, and counts their usage.

Concurrency is counted by each server for itself, the rest as ``counters`` does. ``GateMiddleware`` sends the
headers of an admitted request, and releases it after the response's last byte.
"""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from limits import RateLimitItemPerMinute

from app.admission.counters import Counts, Reservation
from app.admission.estimates import Estimate
from app.admission.quotas import Quota, QuotaGroup, Quotas
from app.allowance import limit_message
from app.auth.principal import Principal
from app.refusals import ThrottledError
from nnsight_engine.core.metering import UsageMeter

_MIN_RETRY_S: Final = 1
_REMAINING: Final = "x-ratelimit-remaining-requests"


class Admitted:
    """An admitted request; calls ``release`` with itself when the request is over."""

    def __init__(
        self,
        headers: dict[str, str],
        meter: UsageMeter,
        groups: Sequence[QuotaGroup],
        quotas: Quotas,
        release: Callable[[Admitted], None],
    ) -> None:
        self.headers = headers
        self.meter = meter
        self.groups = groups
        self.reserved: list[Reservation] = []
        self._quotas = quotas
        self._release: Callable[[Admitted], None] | None = release

    async def check(self, *quotas: Quota) -> None:
        """Raise ThrottledError if a quota that the request is going to use is used up."""
        self.headers |= await self._quotas.check(self.groups, *quotas)

    async def reserve(self, estimate: Estimate) -> None:
        """Reserve tokens; raise ApiError ``request_beyond_limit`` or ``rate_limit_exceeded``."""
        try:
            self.reserved, header_sets = await self._quotas.reserve(self.groups, estimate)
        except ThrottledError as error:
            # The error has these headers itself, with newer values; they must not be sent twice.
            self.headers = {name: value for name, value in self.headers.items() if name not in error.headers}
            raise
        self.headers |= header_sets

    def release(self) -> None:
        """Mark the response as over; idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release(self)


class Rates:
    def __init__(self, url: str) -> None:
        self.counts = Counts(url)
        self._quotas = Quotas(self.counts)
        self._running: collections.Counter[str] = collections.Counter()
        self._settling: set[asyncio.Task[None]] = set()

    def num_running(self, tenant: str) -> int:
        """Return how many completions, chats, traces and trainings of a tenant run on this server."""
        return self._running[f"tenant:{tenant}"]

    async def admit(self, caller: Principal, meter: UsageMeter, *, works: bool) -> Admitted | None:
        """Return None if nothing is counted for the request; raises ThrottledError if it exceeds a limit.

        ``works``: it uses the engine, so that the limits on concurrency and tokens apply.
        """
        groups = groups_of(caller)
        if not (groups or works):
            return None
        headers: dict[str, str] = {}
        if works:
            self._check_running(groups)
            headers |= await self._quotas.check(groups, Quota.TOKENS)
        for group in groups:
            await self._check_rate(group)
        # Other requests may have been admitted while this one waited for the storage, so check again.
        names = [f"key:{caller.key_id}", f"tenant:{caller.tenant}"] if works else []
        self._check_running(groups if works else [])
        self._running.update(names)
        try:
            header_sets = [await self._count(group) for group in groups]
        except BaseException:
            self._end(names)
            raise
        headers |= min(filter(None, header_sets), key=lambda one: int(one[_REMAINING]), default={})

        def release(admitted: Admitted) -> None:
            self._end(names)
            self._count_later(admitted)

        return Admitted(headers, meter, groups, self._quotas, release)

    async def reserve_unchecked(self, caller: Principal, estimate: Estimate) -> list[Reservation]:
        """Reserve the tokens of work that is not a request, such as a job, when it begins."""
        return await self._quotas.reserve_unchecked(groups_of(caller), estimate)

    async def count(self, caller: Principal, meter: UsageMeter, reserved: Sequence[Reservation] = ()) -> None:
        """Count the usage of such work, and release the unused part of its reservations."""
        await self._quotas.settle(groups_of(caller), meter, reserved)

    async def wait_s(self, caller: Principal) -> int:
        """Return the seconds until work that is not a request may begin for a caller; 0 for now."""
        return await self._quotas.wait_s(groups_of(caller))

    async def close(self) -> None:
        await asyncio.gather(*self._settling, return_exceptions=True)

    def _count_later(self, admitted: Admitted) -> None:
        if not admitted.groups:
            return
        counting = self._quotas.settle(admitted.groups, admitted.meter, admitted.reserved)
        task = asyncio.create_task(counting)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _check_running(self, groups: Sequence[QuotaGroup]) -> None:
        for group in groups:
            most = group.limits.concurrency
            if most is not None and self._running[group.name] >= most:
                running, then = self._running[group.name], "send this one again when one of them has ended"
                message = limit_message(group.subject, most, "running requests", running, 1, then)
                raise ThrottledError(message, {"Retry-After": str(_MIN_RETRY_S)})

    def _end(self, names: list[str]) -> None:
        self._running.subtract(names)
        for name in names:
            if self._running[name] <= 0:
                del self._running[name]

    async def _check_rate(self, group: QuotaGroup) -> None:
        most = group.limits.requests_per_minute
        if most is not None and not await self.counts.test(RateLimitItemPerMinute(most), group.name):
            raise await self._beyond(group, most)

    async def _count(self, group: QuotaGroup) -> dict[str, str]:
        most = group.limits.requests_per_minute
        if most is None:
            return {}
        if not await self.counts.hit(RateLimitItemPerMinute(most), group.name):
            raise await self._beyond(group, most)
        return await self._left(group, most)

    async def _beyond(self, group: QuotaGroup, most: int) -> ThrottledError:
        headers = await self._left(group, most)
        wait = headers["x-ratelimit-reset-requests"].removesuffix("s")
        return ThrottledError(
            f"{group.subject} may send {most} requests a minute, and has sent them: send this one again in "
            f"{wait} s.",
            {**headers, "Retry-After": wait},
        )

    async def _left(self, group: QuotaGroup, most: int) -> dict[str, str]:
        stats = await self.counts.stats(RateLimitItemPerMinute(most), group.name)
        return {
            "x-ratelimit-limit-requests": str(most),
            _REMAINING: str(max(0, stats.remaining)),
            "x-ratelimit-reset-requests": f"{max(_MIN_RETRY_S, math.ceil(stats.reset_time - time.time()))}s",
        }


def groups_of(caller: Principal) -> list[QuotaGroup]:
    return [
        group
        for group in (
            QuotaGroup(f"key:{caller.key_id}", f"the key {caller.key_id!r}", caller.limits),
            QuotaGroup(f"tenant:{caller.tenant}", f"the tenant {caller.tenant!r}", caller.tenant_limits),
        )
        if group.limits.model_fields_set
    ]


__all__ = ["Admitted", "Rates", "groups_of"]
