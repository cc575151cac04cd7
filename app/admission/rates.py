"""Limits of keys and tenants over time: admits or rejects requests, and counts their usage.

Concurrency is counted by each server for itself, the rest as ``counters`` does. Usage is counted when a
request is over; a used-up minute admits none. Concurrent requests would exceed the token quota by far, so
each reserves the tokens that it asks for and releases the rest. Usage beyond a minute's quota is carried
over, so that later requests wait accordingly.

``RequestMiddleware`` sends the headers of an admitted request, and ends it after the last byte of its
response.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from limits import RateLimitItemPerMinute

from api_schemas.administration import Limits
from api_schemas.errors import ApiError, ErrorCode
from app.admission.counters import Counts, Reservation, Used
from app.admission.estimates import Estimate
from app.auth.principal import Principal
from app.limits.limit import UNBOUNDED, Holder, Limit, Spending, ThrottledError, name_of_key, subject
from nnsight_engine.core.work_context import UsageMeter

_MIN_RETRY_S: Final = 1
_REMAINING: Final = "x-ratelimit-remaining-requests"
_REMAINING_TOKENS: Final = "x-ratelimit-remaining-tokens"
_MICROSECONDS: Final = 10**6


class Quota(enum.Enum):
    """A quota; its value is the field of ``Limits`` with its amount per minute."""

    TOKENS = "tokens_per_minute"
    CAPTURED_BYTES = "captured_bytes_per_minute"
    INTERVENTION_TIME = "intervention_seconds_per_minute"

    def most(self, limits: Limits) -> int | None:
        """Return the limit as it is counted: in tokens, bytes or microseconds; None for no limit."""
        most: float | None = getattr(limits, self.value)
        return None if most is None else max(1, int(most * self._scale))

    def used(self, meter: UsageMeter) -> int:
        """Return the usage in the same unit as ``most``."""
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


class QuotaGroup(NamedTuple):
    """The requests that share limits: those of a key, or of all keys of a tenant; see ``Holder.names``."""

    name: str
    limits: Limits


class Admitted:
    """An admitted request; when it is over, ``running`` is to be closed, and ``bill`` to be called."""

    def __init__(
        self, rates: Rates, groups: Sequence[QuotaGroup], meter: UsageMeter, running: Spending
    ) -> None:
        self.headers: dict[str, str] = {}
        self.running = running
        self._rates = rates
        self._groups = groups
        self._meter = meter
        self._reserved: list[Reservation] = []
        self._is_billed = False

    async def check(self, *quotas: Quota) -> None:
        """Raise ThrottledError if a quota that the request is going to use is used up."""
        self.headers |= await self._rates.check(self._groups, *quotas)

    def check_alone(self, estimate: Estimate) -> None:
        """Raise ApiError ``request_beyond_limit`` if the request alone exceeds the tokens of a minute."""
        for group, _, most in _limited(self._groups, [Quota.TOKENS]):
            _check_alone(group, most, estimate)

    async def reserve(self, estimate: Estimate) -> None:
        """Reserve tokens; raise ApiError ``request_beyond_limit`` or ``rate_limit_exceeded``."""
        try:
            self._reserved, headers = await self._rates.reserve(self._groups, estimate)
        except ThrottledError as error:
            # The error has these headers itself, with newer values; they must not be sent twice.
            self.headers = {name: value for name, value in self.headers.items() if name not in error.headers}
            raise
        self.headers |= headers

    def bill(self) -> None:
        """Count the request's usage in the background, and release the unused tokens; idempotent."""
        if self._groups and not self._is_billed:
            self._is_billed = True
            self._rates.bill_later(self._groups, self._meter, self._reserved)


class Rates:
    """The limits of all callers; ``url`` is the storage of the counts, see ``app.admission.counters``."""

    def __init__(self, url: str) -> None:
        self.counts = Counts(url)
        self._running = Limit(
            "running requests", UNBOUNDED, then="send this one again when one of them has ended"
        )
        self._billing: set[asyncio.Task[None]] = set()

    def num_running(self, tenant: str) -> int:
        """Return how many completions, chats, traces and trainings of a tenant run on this server."""
        return self._running.used(tenant)

    async def admit(self, caller: Principal, meter: UsageMeter, *, works: bool) -> Admitted | None:
        """Return None if nothing is counted for the request; raises ThrottledError if it exceeds a limit.

        ``works``: it uses the engine, so that the limits on concurrency and tokens apply.
        """
        groups = groups_of(caller)
        if not (groups or works):
            return None
        running = self._running.spend(Holder(caller.tenant, caller.key_id))
        admitted = Admitted(self, groups, meter, running)
        if works:
            self._check_running(groups)
            await admitted.check(Quota.TOKENS)
        for group, item in _request_rates(groups):
            if not await self.counts.test(item, group.name):
                raise await self._beyond(group, item)
        if works:  # others may have been admitted while this one waited for the storage, so check again
            self._check_running(groups)
            running.add(1)
        try:
            header_sets = [await self._hit(group, item) for group, item in _request_rates(groups)]
        except BaseException:
            running.close()
            raise
        admitted.headers |= _least(header_sets, _REMAINING)
        return admitted

    async def check(self, groups: Sequence[QuotaGroup], *quotas: Quota) -> dict[str, str]:
        """Return OpenAI's headers, if tokens are checked and limited; raises ThrottledError."""
        header_sets: list[dict[str, str]] = []
        for group, quota, most in _limited(groups, quotas):
            used = await self.counts.used(_name(group, quota))
            if used.amount >= most:
                raise await self._used_up(group, quota, most)
            if quota is Quota.TOKENS:
                header_sets.append(_token_headers(most, used))
        return _least(header_sets, _REMAINING_TOKENS)

    async def wait_s(self, caller: Principal) -> int:
        """Return the seconds until a caller has some of each quota left, for a job; 0 for now."""
        wait = 0
        for group, quota, most in _limited(groups_of(caller), Quota):
            used = await self.counts.used(_name(group, quota))
            if used.amount >= most:
                ahead = await self.counts.used(_name(group, quota), ahead=True)
                wait = max(wait, ahead.wait_s(most - 1))
        return wait

    async def reserve(
        self, groups: Sequence[QuotaGroup], estimate: Estimate
    ) -> tuple[list[Reservation], dict[str, str]]:
        """Return the reservations, to be passed to ``bill``, and OpenAI's headers; raises ThrottledError.

        Raises ApiError ``request_beyond_limit`` if the request alone exceeds the quota of a minute.
        """
        reserved: list[Reservation] = []
        header_sets: list[dict[str, str]] = []
        try:
            for group, _, most in _limited(groups, [Quota.TOKENS]):
                header_sets.append(await self._reserve(group, most, estimate, reserved))
        except BaseException:
            for reservation in reserved:
                await self.counts.release(reservation, reservation.amount)
            raise
        return reserved, _least(header_sets, _REMAINING_TOKENS)

    async def _reserve(
        self, group: QuotaGroup, most: int, estimate: Estimate, reserved: list[Reservation]
    ) -> dict[str, str]:
        """Return OpenAI's headers; adds to ``reserved``, also if this raises ThrottledError afterwards."""
        _check_alone(group, most, estimate)
        # Estimates may be wrong, so they never exceed the quota of an unused minute.
        amount = min(estimate.stated + estimate.guessed, most)
        reservation, used = await self.counts.reserve(_name(group, Quota.TOKENS), amount)
        reserved.append(reservation)
        if used.amount > most:
            raise await self._used_up(group, Quota.TOKENS, most, reservation)
        return _token_headers(most, used)

    async def reserve_unchecked(self, caller: Principal, estimate: Estimate) -> list[Reservation]:
        """Reserve the tokens of work that runs in any case, such as a job; pass them to ``bill``."""
        requested = estimate.stated + estimate.guessed
        return [
            (await self.counts.reserve(_name(group, quota), min(requested, most)))[0]
            for group, quota, most in _limited(groups_of(caller), [Quota.TOKENS])
        ]

    async def bill(
        self, groups: Sequence[QuotaGroup], meter: UsageMeter, reserved: Sequence[Reservation] = ()
    ) -> None:
        """Count the usage of work that is over, and release the unused part of its reservations."""
        await meter.settled()
        by_name = {reservation.name: reservation for reservation in reserved}
        for group, quota, most in _limited(groups, Quota):
            name, used = _name(group, quota), quota.used(meter)
            reservation = by_name.get(name)
            if reservation is not None:
                await self.counts.release(reservation, reservation.amount - used)
            beyond = used - (0 if reservation is None else reservation.amount)
            if beyond > 0:
                await self.counts.add(name, beyond, most)

    def bill_later(
        self, groups: Sequence[QuotaGroup], meter: UsageMeter, reserved: Sequence[Reservation]
    ) -> None:
        task = asyncio.create_task(self.bill(groups, meter, reserved))
        self._billing.add(task)
        task.add_done_callback(self._billing.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._billing, return_exceptions=True)

    def _check_running(self, groups: Sequence[QuotaGroup]) -> None:
        """Raise ThrottledError if a group has as many running requests as its limit on concurrency."""
        for group in groups:
            most, used = group.limits.concurrency, self._running.used(group.name)
            if most is not None and used >= most:
                message = self._running.exceeded(group.name, most, used).message
                raise ThrottledError(message, {"Retry-After": str(_MIN_RETRY_S)})

    async def _hit(self, group: QuotaGroup, item: RateLimitItemPerMinute) -> dict[str, str]:
        """Count one request of a group, and return its headers; raises ThrottledError beyond its limit."""
        if not await self.counts.hit(item, group.name):
            raise await self._beyond(group, item)
        return await self._request_headers(group, item)

    async def _beyond(self, group: QuotaGroup, item: RateLimitItemPerMinute) -> ThrottledError:
        """Return the error of a group that has sent all its requests of this minute."""
        headers = await self._request_headers(group, item)
        wait = headers["x-ratelimit-reset-requests"].removesuffix("s")
        return ThrottledError(
            f"{subject(group.name)} may send {item.amount} requests a minute, and has sent them: send this "
            f"one again in {wait} s.",
            {**headers, "Retry-After": wait},
        )

    async def _request_headers(self, group: QuotaGroup, item: RateLimitItemPerMinute) -> dict[str, str]:
        stats = await self.counts.stats(item, group.name)
        return {
            "x-ratelimit-limit-requests": str(item.amount),
            _REMAINING: str(max(0, stats.remaining)),
            "x-ratelimit-reset-requests": f"{max(_MIN_RETRY_S, math.ceil(stats.reset_time - time.time()))}s",
        }

    async def _used_up(
        self, group: QuotaGroup, quota: Quota, most: int, reservation: Reservation | None = None
    ) -> ThrottledError:
        """Return the error of a used-up quota, with the seconds until it has room for the request.

        ``reservation`` is the request's own, which does not count as used; None before it has one.
        """
        used = await self.counts.used(_name(group, quota), ahead=True)
        amount = 1 if reservation is None else reservation.amount
        if reservation is not None:
            used = dataclasses.replace(used, now=used.now - amount)
        wait = used.wait_s(most - amount)
        amount_text = "" if amount == 1 else f", and this one asks for {quota.text(amount)}"
        headers = {"Retry-After": str(wait)}
        if quota is Quota.TOKENS:
            headers |= _token_headers(most, used)
        return ThrottledError(
            f"{subject(group.name)} may use {quota.text(most)} a minute and has used "
            f"{quota.text(used.amount)}{amount_text}: send this one again in {wait} s.",
            headers,
        )


def groups_of(caller: Principal) -> list[QuotaGroup]:
    """Return the groups that a caller's work counts for: its key and its tenant, if they have limits."""
    key = QuotaGroup(name_of_key(caller.key_id), caller.limits)
    tenant = QuotaGroup(caller.tenant, caller.tenant_limits)
    return [group for group in (key, tenant) if group.limits.model_fields_set]


def _request_rates(groups: Sequence[QuotaGroup]) -> Iterator[tuple[QuotaGroup, RateLimitItemPerMinute]]:
    for group in groups:
        if group.limits.requests_per_minute is not None:
            yield group, RateLimitItemPerMinute(group.limits.requests_per_minute)


def _limited(
    groups: Sequence[QuotaGroup], quotas: Iterable[Quota]
) -> Iterator[tuple[QuotaGroup, Quota, int]]:
    """Yield each of the quotas that a group is limited by, with its limit as it is counted."""
    for quota in quotas:
        for group in groups:
            most = quota.most(group.limits)
            if most is not None:
                yield group, quota, most


def _check_alone(group: QuotaGroup, most: int, estimate: Estimate) -> None:
    if estimate.stated > most:
        raise ApiError(
            ErrorCode.BEYOND_LIMIT,
            f"{subject(group.name)} may use {most} tokens a minute, and this request asks for "
            f"{estimate.stated} by itself: its prompts' and the most that it may generate. Send it with "
            "fewer, or in parts.",
            "max_tokens",
        )


def _name(group: QuotaGroup, quota: Quota) -> str:
    return f"{group.name}/{quota.value}"


def _token_headers(most: int, used: Used) -> dict[str, str]:
    return {
        "x-ratelimit-limit-tokens": str(most),
        _REMAINING_TOKENS: str(max(0, most - used.amount)),
        "x-ratelimit-reset-tokens": f"{used.wait_s(0)}s",
    }


def _least(header_sets: list[dict[str, str]], remaining: str) -> dict[str, str]:
    """Return the headers of the group with the fewest left, as OpenAI has one set; empty if there is none."""
    return min(header_sets, key=lambda headers: int(headers[remaining]), default={})
