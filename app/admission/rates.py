"""Rate limits and quotas of keys and tenants: admits or rejects requests, and counts their usage.

Concurrency is counted by each server for itself, the rest as ``counters`` does. Usage is counted when a
request is over; a used-up minute admits none. Concurrent requests would exceed the token quota by far, so
each reserves the tokens that it asks for and releases the rest. Usage beyond a minute's quota is carried
over, so that later requests wait accordingly.

``RequestMiddleware`` sends the headers of an admitted request, and releases it after the last byte of its
response.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from limits import RateLimitItemPerMinute

from api_schemas.administration import Limits
from api_schemas.errors import ApiError, ErrorCode
from app.admission.counters import Counts, Reservation, Used
from app.admission.estimates import Estimate
from app.auth.principal import Principal
from app.limits.allowances import ThrottledError, limit_message
from nnsight_engine.core.work_context import UsageMeter

_REMAINING_TOKENS: Final = "x-ratelimit-remaining-tokens"
_MICROSECONDS: Final = 10**6


class Quota(enum.Enum):
    """A quota; its value is the field of ``Limits`` with its amount per minute."""

    TOKENS = "tokens_per_minute"
    CAPTURED_BYTES = "captured_bytes_per_minute"
    INTERVENTION_TIME = "intervention_seconds_per_minute"

    def limit(self, limits: Limits) -> int | None:
        most: float | None = getattr(limits, self.value)
        return None if most is None else max(1, int(most * self._scale))

    def used(self, meter: UsageMeter) -> int:
        if self is Quota.TOKENS:
            return meter.num_tokens
        if self is Quota.CAPTURED_BYTES:
            return meter.captured_bytes
        return round(meter.intervention_s * _MICROSECONDS)

    def text(self, amount: int) -> str:
        return f"{amount / self._scale:g} {_UNITS[self]}"

    @property
    def _scale(self) -> int:
        return _MICROSECONDS if self is Quota.INTERVENTION_TIME else 1


_UNITS: Final = {
    Quota.TOKENS: "tokens",
    Quota.CAPTURED_BYTES: "captured bytes",
    Quota.INTERVENTION_TIME: "seconds of interventions",
}
INTERVENING: Final = (Quota.CAPTURED_BYTES, Quota.INTERVENTION_TIME)
"""Quotas that only requests with interventions use."""


@dataclasses.dataclass(frozen=True, slots=True)
class QuotaGroup:
    """The requests that share limits: those of a key, or of all keys of a tenant."""

    name: str
    text: str
    limits: Limits

    @property
    def subject(self) -> str:
        return self.text[0].upper() + self.text[1:]


class Quotas:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    async def check(self, groups: Sequence[QuotaGroup], *quotas: Quota) -> dict[str, str]:
        """Return OpenAI's headers, if tokens are checked and limited; raises ThrottledError."""
        header_sets: list[dict[str, str]] = []
        for group, quota, most in _limited(groups, quotas):
            used = await self._counts.used(_name(group, quota))
            if used.amount >= most:
                raise await self._used_up(group, quota, most)
            if quota is Quota.TOKENS:
                header_sets.append(_headers(most, used))
        return _least(header_sets)

    async def wait_s(self, groups: Sequence[QuotaGroup]) -> int:
        """Return the seconds until all groups have some of each quota left; 0 if they have now."""
        wait = 0
        for group, quota, most in _limited(groups, Quota):
            used = await self._counts.used(_name(group, quota))
            if used.amount >= most:
                ahead = await self._counts.used(_name(group, quota), ahead=True)
                wait = max(wait, ahead.wait_s(most - 1))
        return wait

    async def reserve(
        self, groups: Sequence[QuotaGroup], estimate: Estimate
    ) -> tuple[list[Reservation], dict[str, str]]:
        """Return the reservations, to be passed to ``settle``, and OpenAI's headers; raises ThrottledError.

        Raises ApiError ``request_beyond_limit`` if the request alone exceeds the quota of a minute.
        """
        reserved: list[Reservation] = []
        header_sets: list[dict[str, str]] = []
        try:
            for group, _, most in _limited(groups, [Quota.TOKENS]):
                header_sets.append(await self._reserve(group, most, estimate, reserved))
        except BaseException:
            await self._release(reserved)
            raise
        return reserved, _least(header_sets)

    async def _reserve(
        self, group: QuotaGroup, most: int, estimate: Estimate, reserved: list[Reservation]
    ) -> dict[str, str]:
        if estimate.stated > most:
            raise ApiError(
                ErrorCode.BEYOND_LIMIT,
                f"{group.subject} may use {most} tokens a minute, and this request asks for "
                f"{estimate.stated} by itself: its prompts' and the most that it may generate. Send it with "
                "fewer, or in parts.",
                "max_tokens",
            )
        # Estimates may be wrong, so they never exceed the quota of an unused minute.
        amount = min(estimate.stated + estimate.guessed, most)
        reservation, used = await self._counts.reserve(_name(group, Quota.TOKENS), amount)
        reserved.append(reservation)
        if used.amount > most:
            raise await self._used_up(group, Quota.TOKENS, most, reservation)
        return _headers(most, used)

    async def reserve_unchecked(self, groups: Sequence[QuotaGroup], estimate: Estimate) -> list[Reservation]:
        """Reserve tokens for work that runs in any case; pass the reservations to ``settle``."""
        requested = estimate.stated + estimate.guessed
        return [
            (await self._counts.reserve(_name(group, quota), min(requested, most)))[0]
            for group, quota, most in _limited(groups, [Quota.TOKENS])
        ]

    async def _release(self, reserved: Sequence[Reservation]) -> None:
        for one in reserved:
            await self._counts.release(one, one.amount)

    async def settle(
        self, groups: Sequence[QuotaGroup], meter: UsageMeter, reserved: Sequence[Reservation] = ()
    ) -> None:
        """Count the usage of a request that is over, and release the unused part of its reservations."""
        await meter.settled()
        by_name = {one.name: one for one in reserved}
        for group, quota, most in _limited(groups, Quota):
            name, used = _name(group, quota), quota.used(meter)
            reservation = by_name.get(name)
            if reservation is not None:
                await self._counts.release(reservation, reservation.amount - used)
            beyond = used - (0 if reservation is None else reservation.amount)
            if beyond > 0:
                await self._counts.add(name, beyond, most)

    async def _used_up(
        self, group: QuotaGroup, quota: Quota, most: int, reservation: Reservation | None = None
    ) -> ThrottledError:
        used = await self._counts.used(_name(group, quota), ahead=True)
        num_requests = 1 if reservation is None else reservation.amount
        if reservation is not None:
            used = dataclasses.replace(used, now=used.now - num_requests)
        wait = used.wait_s(most - num_requests)
        more = "" if num_requests == 1 else f", and this one asks for {quota.text(num_requests)}"
        headers = {"Retry-After": str(wait)}
        if quota is Quota.TOKENS:
            headers |= _headers(most, used)
        return ThrottledError(
            f"{group.subject} may use {quota.text(most)} a minute and has used "
            f"{quota.text(used.amount)}{more}: send this one again in {wait} s.",
            headers,
        )


def _headers(most: int, used: Used) -> dict[str, str]:
    return {
        "x-ratelimit-limit-tokens": str(most),
        _REMAINING_TOKENS: str(max(0, most - used.amount)),
        "x-ratelimit-reset-tokens": f"{used.wait_s(0)}s",
    }


def _least(header_sets: list[dict[str, str]]) -> dict[str, str]:
    return min(header_sets, key=lambda headers: int(headers[_REMAINING_TOKENS]), default={})


def _limited(
    groups: Sequence[QuotaGroup], quotas: Iterable[Quota]
) -> Iterator[tuple[QuotaGroup, Quota, int]]:
    for quota in quotas:
        for group in groups:
            most = quota.limit(group.limits)
            if most is not None:
                yield group, quota, most


def _name(group: QuotaGroup, quota: Quota) -> str:
    return f"{group.name}/{quota.value}"


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
