"""What keys and tenants may use up in a minute: tokens, bytes that leave the engine, seconds of its time.

What a request will use is known afterwards. So a minute that is used up lets nobody in, and what a request
did use is counted when it is over, however it ended. Tokens are what many requests at once would run past by
far: each sets aside beforehand what it asks for, and gives back what it did not use. What was used beyond a
minute is counted in those after it, so that the next ones wait for as long as it takes. ``Rates`` is the
caller.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.keys import Limits
from app.admission.counts import Counts, Taken, Used
from app.admission.estimates import Estimate
from app.admission.refusals import ThrottledError
from nnsight_engine.core.metering import UsageMeter

_REMAINING: Final = "x-ratelimit-remaining-tokens"
_MICROSECONDS: Final = 10**6


class Quota(enum.Enum):
    """Something that is used up; its value is the field of ``Limits`` that says how much may be."""

    TOKENS = "tokens_per_minute"
    CAPTURED_BYTES = "captured_bytes_per_minute"
    INTERVENTION_TIME = "intervention_seconds_per_minute"

    def limit(self, limits: Limits) -> int | None:
        """Return how much may be used in a minute, None for as much as anybody likes."""
        most: float | None = getattr(limits, self.value)
        return None if most is None else max(1, int(most * self._scale))

    def used(self, meter: UsageMeter) -> int:
        """Return how much a request has used."""
        if self is Quota.TOKENS:
            return meter.num_tokens
        if self is Quota.CAPTURED_BYTES:
            return meter.captured_bytes
        return round(meter.intervention_s * _MICROSECONDS)

    def said(self, amount: int) -> str:
        """Return an amount for people."""
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
"""What only requests use that intervene."""


@dataclasses.dataclass(frozen=True, slots=True)
class QuotaGroup:
    """Whose requests are counted together: those of a key, or of all keys of a tenant."""

    name: str
    said: str
    limits: Limits


class Quotas:
    """What is used up, by group.

    Args:
        counts: Keep it.
    """

    def __init__(self, counts: Counts) -> None:
        """Begin with whatever is counted there."""
        self._counts = counts

    async def check(self, groups: Sequence[QuotaGroup], *quotas: Quota) -> dict[str, str]:
        """Let a request in whose callers have something left of these.

        Returns:
            OpenAI's headers of tokens, where these are asked for and limited.

        Raises:
            ThrottledError: One of them is used up.
        """
        told: list[dict[str, str]] = []
        for quota in quotas:
            for group in groups:
                most = quota.limit(group.limits)
                if most is None:
                    continue
                used = await self._counts.used(_name(group, quota))
                if used.amount >= most:
                    raise await self._used_up(group, quota, most)
                if quota is Quota.TOKENS:
                    told.append(_headers(most, used))
        return _least(told)

    async def wait_s(self, groups: Sequence[QuotaGroup]) -> int:
        """Return in how many seconds all have something left of everything: 0 if they have."""
        wait = 0
        for quota in Quota:
            for group in groups:
                most = quota.limit(group.limits)
                if most is None:
                    continue
                used = await self._counts.used(_name(group, quota))
                if used.amount >= most:
                    used = await self._counts.used(_name(group, quota), ahead=True)
                    wait = max(wait, used.wait_s(most - 1))
        return wait

    async def reserve(
        self, groups: Sequence[QuotaGroup], estimate: Estimate
    ) -> tuple[list[Taken], dict[str, str]]:
        """Set tokens aside for a request.

        Returns:
            What was, to be given to ``settle``; and OpenAI's headers.

        Raises:
            ApiError: ``request_beyond_limit``: no minute has so many.
            ThrottledError: This one has not.
        """
        reserved: list[Taken] = []
        told: list[dict[str, str]] = []
        try:
            for group in groups:
                most = Quota.TOKENS.limit(group.limits)
                if most is not None:
                    told.append(await self._reserve(group, most, estimate, reserved))
        except BaseException:
            await self._give_back(reserved)
            raise
        return reserved, _least(told)

    async def _reserve(
        self, group: QuotaGroup, most: int, estimate: Estimate, reserved: list[Taken]
    ) -> dict[str, str]:
        if estimate.stated > most:
            raise ApiError(
                ErrorCode.BEYOND_LIMIT,
                f"{_capital(group.said)} may use {most} tokens a minute, and this request asks for "
                f"{estimate.stated} by itself: its prompts' and the most that it may generate. Send it with "
                "fewer, or in parts.",
                "max_tokens",
            )
        # What is guessed may be wrong, and keeps nobody from an empty minute.
        amount = min(estimate.stated + estimate.guessed, most)
        taken, used = await self._counts.take(_name(group, Quota.TOKENS), amount)
        reserved.append(taken)
        if used.amount > most:
            raise await self._used_up(group, Quota.TOKENS, most, taken)
        return _headers(most, used)

    async def set_aside(self, groups: Sequence[QuotaGroup], estimate: Estimate) -> list[Taken]:
        """Set tokens aside for something that runs in any case; returns them, to be given to ``settle``."""
        asked = estimate.stated + estimate.guessed
        limits = [(group, Quota.TOKENS.limit(group.limits)) for group in groups]
        return [
            (await self._counts.take(_name(group, Quota.TOKENS), min(asked, most)))[0]
            for group, most in limits
            if most is not None
        ]

    async def _give_back(self, reserved: Sequence[Taken]) -> None:
        for one in reserved:
            await self._counts.give_back(one, one.amount)

    async def settle(
        self, groups: Sequence[QuotaGroup], meter: UsageMeter, reserved: Sequence[Taken] = ()
    ) -> None:
        """Count what a request has used that is over, less what it had set aside."""
        await meter.settled()
        aside = {one.name: one for one in reserved}
        for quota in Quota:
            used = quota.used(meter)
            for group in groups:
                most = quota.limit(group.limits)
                if most is None:
                    continue
                name = _name(group, quota)
                taken = aside.get(name)
                if taken is not None:
                    await self._counts.give_back(taken, taken.amount - used)
                beyond = used - (0 if taken is None else taken.amount)
                if beyond > 0:
                    await self._counts.add(name, beyond, most)

    async def _used_up(
        self, group: QuotaGroup, quota: Quota, most: int, taken: Taken | None = None
    ) -> ThrottledError:
        """Return what somebody is told who has used all up, or has not enough left for what was taken."""
        used = await self._counts.used(_name(group, quota), ahead=True)
        asks = 1 if taken is None else taken.amount
        if taken is not None:
            used = dataclasses.replace(used, now=used.now - asks)
        wait = used.wait_s(most - asks)
        more = "" if asks == 1 else f", and this one asks for {quota.said(asks)}"
        headers = {"Retry-After": str(wait)}
        if quota is Quota.TOKENS:
            headers |= _headers(most, used)
        return ThrottledError(
            f"{_capital(group.said)} may use {quota.said(most)} a minute and has used "
            f"{quota.said(used.amount)}{more}: send this one again in {wait} s.",
            headers,
        )


def _headers(most: int, used: Used) -> dict[str, str]:
    return {
        "x-ratelimit-limit-tokens": str(most),
        _REMAINING: str(max(0, most - used.amount)),
        "x-ratelimit-reset-tokens": f"{used.wait_s(0)}s",
    }


def _least(told: list[dict[str, str]]) -> dict[str, str]:
    return min(told, key=lambda headers: int(headers[_REMAINING]), default={})


def _name(group: QuotaGroup, quota: Quota) -> str:
    return f"{group.name}/{quota.value}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


__all__ = ["INTERVENING", "Quota", "QuotaGroup", "Quotas"]
