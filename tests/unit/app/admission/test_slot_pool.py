"""Places of which nobody has more than their share, and queues that nobody fills for others."""

from __future__ import annotations

import asyncio

import pytest

from api_schemas.errors import ApiError
from app.admission.slot_pool import Slot, SlotPool
from app.allowance import Allowance


def pool(num: int = 4, max_waiting: int = 4) -> SlotPool:
    return SlotPool(Allowance.of("things", num, 0.5), Allowance.of("things that wait", max_waiting, 0.5))


def granted(asked: list[Slot]) -> list[bool]:
    return [slot.is_granted for slot in asked]


async def test_no_tenant_exceeds_its_share_and_tenants_take_turns() -> None:
    some = pool()
    ours = [some.request("a", "one request") for _ in range(6)]
    assert granted(ours) == [True, True, False, False, False, False]
    theirs, third = [some.request("b", n) for n in range(3)], some.request("c", 0)
    assert granted([*theirs, third]) == [True, True, False, False]
    ours[0].release()
    ours[0].release()
    assert granted([ours[2], theirs[2], third]) == [True, False, False]
    theirs[0].release()
    theirs[1].release()
    assert granted([ours[3], theirs[2], third]) == [False, True, True]
    for slot in [*ours, *theirs, third]:
        slot.release()
    assert some.num_waiting == 0
    assert granted([some.request(tenant, 0) for tenant in "abcd"]) == [True] * 4


async def test_who_waits_already_or_may_exceed_the_queue_is_let_into_it() -> None:
    some = pool()
    for number in range(4):
        some.request("a", number)
    with pytest.raises(ApiError, match="The tenant 'a' may have 2 things that wait"):
        some.request("a", 4)
    some.request("a", 3)  # of one that waits already
    some.request("a", 4, may_exceed_queue=True)
    assert granted([some.request("b", number) for number in range(3)]) == [True, True, False]


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    some = pool(num=1)

    async def hold(name: str) -> None:
        async with some.request(name, name):
            await asyncio.sleep(3600)

    tasks = [asyncio.create_task(hold(name)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0.01)
    assert some.num_waiting == 1
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert some.num_waiting == 0
    assert some.request("d", 0).is_granted
