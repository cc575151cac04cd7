"""Quotas of keys and tenants per minute: tokens, captured bytes, seconds of intervention time.

Usage is counted when a request is over; a used-up minute admits none. Concurrent requests would exceed the
token quota by far, so each reserves the tokens that it asks for and releases the rest. Usage beyond a
minute's quota is carried over, so that later requests wait accordingly.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Limits
from app.admission.counters import Counts, Reservation, Used
from app.admission.estimates import Estimate
from app.refusals import ThrottledError
from nnsight_engine.core.metering import UsageMeter

_REMAINING: Final = "x-ratelimit-remaining-tokens"
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
        _REMAINING: str(max(0, most - used.amount)),
        "x-ratelimit-reset-tokens": f"{used.wait_s(0)}s",
    }


def _least(header_sets: list[dict[str, str]]) -> dict[str, str]:
    return min(header_sets, key=lambda headers: int(headers[_REMAINING]), default={})


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


__all__ = ["INTERVENING", "Quota", "QuotaGroup", "Quotas"]
