"""Shares of tenants: one rule for all counts, queues in which senders take turns, slots nobody has alone."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api_schemas.errors import ApiError, ErrorCode
from app.limits.limit import UNBOUNDED, Holder, Limit, part_of
from app.limits.slots import FairQueue, Slot, Slots
from app.limits.tenant_budget import TenantBudget
from app.settings import Settings
from app.storage.quotas import StoredBytes, StoredQuotas

SHARES = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)
TOTALS = st.integers(0, 2**48)
TENANTS = ["", "acme", "rival", "third"]


@given(TOTALS | st.integers(0, 1000).map(lambda number: 1000 * number), SHARES)
@example(100, 0.07)  # in floating point, more than 7
def test_a_share_is_the_decimal_part_rounded_up(total: int, share: float) -> None:
    part, exact = part_of(total, share), Fraction(str(share)) * total
    assert exact <= part < exact + 1
    assert 0 <= part <= total
    assert part_of(total, 1.0) == total
    assert (part == 0) == (total == 0)  # whatever there is, everybody may have one


@given(st.integers(0, 50), SHARES, st.sampled_from(TENANTS), st.data())
def test_what_is_refused_is_beyond_the_rule_and_says_so(
    total: int, share: float, tenant: str, data: st.DataObject
) -> None:
    limit = Limit("things", total, share, code=ErrorCode.RATE_LIMITED, then="wait")
    own, more = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 60))
    others = data.draw(st.integers(0, 60))
    is_beyond = bool(tenant) and own + more > limit.each
    is_full = own + others + more > total
    who = f"The tenant {tenant!r}" if is_beyond else "This server" if is_full else ""
    counts = {"": own + others, "acme": own, "rival": own, "third": own}
    refused(limit, lambda: limit.check(tenant, more, counts.__getitem__), who)
    spent = [limit.spend(tenant), limit.spend("another")]
    for one, num in zip(spent, (own, others), strict=True):
        one.add(num, may_exceed=True)
    assert limit.has_room(tenant, more) is not (is_beyond or is_full)
    refused(limit, lambda: spent[0].add(more), who)
    assert limit.most(tenant) == (limit.each if tenant else total)


def refused(allowance: Limit, check: Callable[[], None], who: str) -> None:
    """Check that a check passes, or that it refuses in the words that all refusals have."""
    if not who:
        check()
        return
    most = allowance.total if who == "This server" else allowance.each
    with pytest.raises(ApiError) as caught:
        check()
    assert caught.value.code is allowance.code
    assert caught.value.message.startswith(f"{who} may have {most} {allowance.what} and has ")
    assert caught.value.message.endswith(f"; {allowance.then}.")


@pytest.mark.parametrize("of", [lambda limit: limit, StoredBytes])
@given(
    total=st.integers(1, 60),
    share=SHARES,
    steps=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 30), st.booleans()), max_size=40),
)
def test_counts_of_bytes_keep_to_the_rule(
    of: Callable[[Limit], Limit], total: int, share: float, steps: list[tuple[str, int, bool]]
) -> None:
    limit, held = of(Limit("bytes", total, share)), collections.Counter[str]()
    spent = {tenant: limit.spend(tenant) for tenant in TENANTS}
    for tenant, num, is_taken in steps:
        if not is_taken:
            returned = min(num, held[tenant])
            spent[tenant].release(returned)
            held[tenant] -= returned
            continue
        is_within = not tenant or held[tenant] + num <= limit.each
        if is_within and held.total() + num <= total:
            spent[tenant].add(num)
            held[tenant] += num
        else:
            with pytest.raises(ApiError, match="may have"):
                spent[tenant].add(num)
        assert limit.used() == held.total() <= total
        assert all(limit.used(one) == held[one] <= limit.each for one in TENANTS if one)
    for one in spent.values():
        one.close()
        one.close()
    assert limit.used() == 0


def test_what_is_spent_ends_once_however_its_block_ends() -> None:
    limit = Limit("things", 10, 0.5)
    spending = limit.spend("acme", 3)
    with contextlib.suppress(KeyError), spending:
        spending.add(2)
        with pytest.raises(ApiError, match=r"may have 5 things and has 5; send this one again later\."):
            spending.add(1)
        spending.add(1, may_exceed=True)
        assert limit.used("acme") == limit.used() == spending.amount == 6
        raise KeyError
    spending.close()
    spending.release(2)
    assert limit.used("acme") == limit.used() == 0


def test_stored_bytes_count_for_tenant_and_key_over_all_stores() -> None:
    quotas, holder = StoredQuotas(), Holder("acme", "k1")
    jobs, results = [StoredBytes(Limit(name, 100, 0.5), quotas) for name in ("jobs", "results")]
    quotas.set_quota("key:k1", 30)
    written = jobs.spend(holder, 20)
    jobs.keep(written)
    written.close()
    assert [jobs.used(name) for name in ("", "acme", "key:k1")] == [20, 20, 20]
    with pytest.raises(
        ApiError, match="The key 'k1' may have 30 stored bytes and has 20, and this asks for 11"
    ):
        results.spend(holder, 11)
    results.spend(Holder("acme", "k2"), 11)
    quotas.set_quota("acme", 30)
    with pytest.raises(ApiError, match="The tenant 'acme' may have 30 stored bytes and has 31") as caught:
        jobs.spend(Holder("acme", "k2"), 1)
    assert caught.value.code is ErrorCode.STORED_BYTES_FULL
    jobs.store(-50, holder)
    assert (jobs.used(), quotas.used("acme")) == (0, 11)
    jobs.set_stored({holder: 7})
    assert (jobs.used(), quotas.used("key:k1")) == (7, 7)


@given(
    num=st.integers(1, 6),
    max_waiting=st.integers(0, 6),
    share=SHARES,
    steps=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 9)), max_size=60),
)
async def test_slots_keep_to_the_rule_and_none_is_free_for_long(
    num: int, max_waiting: int, share: float, steps: list[tuple[str, int]]
) -> None:
    slots, waiting = Limit("slots", num, share), Limit("waiting", max_waiting, share)
    pool, slots_requested = Slots(slots, waiting), list[Slot]()
    for tenant, choice in steps:
        if choice < 4 and slots_requested:
            slots_requested.pop(choice % len(slots_requested)).release()
        else:
            with contextlib.suppress(ApiError):
                slots_requested.append(pool.request(tenant, object()))
        granted = collections.Counter(one.tenant for one in slots_requested if one.is_granted)
        queued = collections.Counter(one.tenant for one in slots_requested if not one.is_granted)
        assert granted.total() <= num
        assert queued.total() == pool.num_waiting <= max_waiting
        for one in filter(None, TENANTS):
            assert granted[one] <= slots.each
            assert queued[one] <= waiting.each
        # Who waits could have no more: all slots are taken, or all of the tenant's share.
        is_full = granted.total() == num
        assert all(
            is_full or (one and granted[one] == slots.each) for one, number in queued.items() if number
        )


@given(SHARES, st.integers(1, 500))
def test_the_budget_of_a_tenant_has_a_share_of_everything(share: float, number: int) -> None:
    settings = Settings(tenant_share=share, max_queued_traces=number, max_queued_jobs=number)
    budget = TenantBudget.of(settings)
    for field in dataclasses.fields(budget):
        limit: Limit = getattr(budget, field.name)
        if limit.total < UNBOUNDED:
            assert limit.each == part_of(limit.total, share), field.name
    assert budget.waiting_jobs.total == budget.waiting_traces.total == number


def pool(num: int = 4, max_waiting: int = 4) -> Slots:
    return Slots(Limit("things", num, 0.5), Limit("things that wait", max_waiting, 0.5))


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


def filled(*items: tuple[str, str]) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for sender, item in items:
        queue.add(sender, item)
    return queue


GIVEN = (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2"))


async def test_one_of_each_sender_in_turn() -> None:
    queue = filled(*GIVEN)
    foretold = list(queue)
    assert len(queue) == 6
    assert [await queue.take() for _ in range(6)] == foretold == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert len(queue) == 0


async def test_a_later_tenant_does_not_wait_for_all_requests_of_another() -> None:
    queue = filled(("a", "a1"), ("a", "a2"), ("a", "a3"))
    assert await queue.take() == "a1"
    queue.add("b", "b1")
    assert [await queue.take() for _ in range(3)] == ["a2", "b1", "a3"]


async def test_what_is_removed_is_not_taken() -> None:
    queue = filled(*GIVEN)
    assert queue.remove("a1")
    assert queue.remove("c1")
    assert not queue.remove("c1")
    assert [await queue.take() for _ in range(4)] == ["a2", "b1", "a3", "b2"]


async def test_taking_waits_for_an_item() -> None:
    queue: FairQueue[str] = FairQueue()
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.add("a", "a1")
    assert await taking == "a1"
