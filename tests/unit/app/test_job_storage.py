"""Jobs in the database: who runs them, and who follows those that another server runs."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from api_schemas.jobs import JobEvent, JobStatus, JobSummary
from app.limits.limit import Limit
from app.services.jobs import feed as job_feed
from app.services.jobs.feed import JobFeed
from app.storage.database import Database
from app.storage.jobs import store as job_store
from app.storage.jobs.states import JobEnd
from app.storage.jobs.store import LEASE_S, MAX_INTERRUPTIONS, EventPage, JobStore, LeaseLostError, NewJob
from app.storage.tables import JobRow
from tests.waiting import wait_for_async

pytestmark = pytest.mark.both_databases

SUMMARY = JobSummary(model="m", dialect="vllm", kind="trace", num_blocks=1, python="3.12", client="1")
RUNNING = JobEvent(status=JobStatus.RUNNING, time=1.0, engine="vllm")
_COUNT = itertools.count()


class Servers:
    """A database, and servers by name that claim jobs from it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.store = self.named("")

    def named(self, name: str, clock: Callable[[], float] = time.monotonic) -> JobStore:
        return JobStore(self.database, name, waiting=Limit("jobs", 100), ttl_s=60, clock=clock)

    async def add(self, owner: str = "", model: str = "m", **options: Any) -> str:
        values = {"digest": "0", "request_bytes": 1, "idempotency_key": None, "reruns": False, **options}
        new = NewJob(id=f"job-{next(_COUNT)}", owner=owner, model=model, summary=SUMMARY, **values)
        return (await self.store.accept(new))[0].id

    async def get(self, job_id: str, owner: str = "") -> JobRow:
        return await self.store.get(job_id, owner)


@pytest.fixture
def servers(database: Database) -> Servers:
    return Servers(database)


def attempts(jobs: list[JobRow]) -> list[tuple[str, int]]:
    return [(job.id, job.attempt) for job in jobs]


async def claimed(server: JobStore, model: str = "m") -> JobRow:
    job = await server.claim(model, {})
    assert job is not None
    return job


async def test_owners_take_turns_and_each_ones_oldest_comes_first(servers: Servers):
    first = [await servers.add("busy") for _ in range(5)]
    second = [await servers.add("rare") for _ in range(2)]
    server = servers.named("a")
    order = [(await claimed(server)).id for _ in range(7)]
    assert order == [first[0], second[0], first[1], second[1], *first[2:]]


async def test_an_owner_whose_jobs_are_short_does_not_go_first_for_ever(servers: Servers):
    for _ in range(4):
        await servers.add("quick")
        await servers.add("other")
    server = servers.named("a")
    served_at: dict[str, float] = {}
    order: list[str] = []
    for turn in range(8):
        job = await server.claim("m", served_at)
        assert job is not None
        served_at[job.owner] = float(turn + 1)
        order.append(job.owner)
        await server.end(job, JobEnd(JobStatus.COMPLETED, result_bytes=1))
    assert order == ["quick", "other"] * 4


async def test_a_server_taken_for_dead_changes_nothing_any_more(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
):
    job_id = await servers.add(reruns=True)
    slow, other = servers.named("slow"), servers.named("other")
    stale = await claimed(slow)
    await slow.append_events(stale, [RUNNING])
    monkeypatch.setattr(job_store, "LEASE_S", -1.0)  # one look is enough
    assert await slow.recover(own_ids=[job_id]) == []
    assert attempts(await other.recover()) == [(job_id, 1)]
    monkeypatch.undo()
    fresh = await claimed(other)
    assert (fresh.id, fresh.attempt) == (job_id, 2)
    for late in (
        slow.append_events(stale, [RUNNING]),
        slow.end(stale, JobEnd(JobStatus.COMPLETED, result_bytes=1)),
    ):
        with pytest.raises(LeaseLostError):
            await late
    assert await slow.held_jobs([job_id]) == {}
    assert await other.held_jobs([job_id]) == {job_id: False}
    await other.end(fresh, JobEnd(JobStatus.COMPLETED, result_bytes=2))
    assert (await servers.get(job_id)).result_bytes == 2
    events = (await servers.store.events(job_id, "", after=0, limit=100)).events
    assert [event.id for event in events] == list(range(1, len(events) + 1))


@pytest.mark.parametrize("jump_s", [0.0, 86400.0, -86400.0])
async def test_an_unrenewed_lease_expires_in_spite_of_clock_jumps(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, jump_s: float
):
    job_id = await servers.add()
    await claimed(servers.named("a"))
    moment = 1000.0
    other = servers.named("b", clock=lambda: moment)
    assert await other.recover() == []
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
    for _ in range(5):
        moment += LEASE_S / 3
        await servers.named("a").renew([job_id])
        assert await other.recover() == []
    for _ in range(3):
        moment += LEASE_S / 3
        assert await other.recover() == []
    moment += 1
    assert attempts(await other.recover()) == [(job_id, 1)]


async def test_a_job_that_takes_servers_with_it_does_so_only_so_often(servers: Servers):
    job_id = await servers.add(reruns=True)
    for count in range(MAX_INTERRUPTIONS):
        server = servers.named(str(count))
        job = await claimed(server)
        await server.append_events(job, [RUNNING])
        assert attempts(await servers.named("next").recover(dead=[str(count)])) == [(job_id, count + 1)]
    row = await servers.get(job_id)
    assert (row.status, row.code) == ("ERROR", "interrupted")
    assert await servers.named("next").claim("m", {}) is None


async def test_a_job_that_was_claimed_and_never_began_is_not_taken_for_interrupted(servers: Servers):
    job_id, moment = await servers.add(), 0.0
    server = servers.named("a", clock=lambda: moment)
    for _ in range(MAX_INTERRUPTIONS + 1):
        await claimed(server)
        assert await server.recover() == []
        moment += LEASE_S + 1
        assert [job.id for job in await server.recover()] == [job_id]
    row = await servers.get(job_id)
    assert (row.status, row.num_interruptions, row.num_events, row.lease_by) == ("QUEUED", 0, 2, None)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_job_that_was_to_end_is_not_given_back_to_run_again(servers: Servers, *, has_begun: bool):
    cancelled_id, removed_id = await servers.add(), await servers.add()
    server = servers.named("a")
    jobs = [await claimed(server) for _ in range(2)]
    await servers.store.cancel(cancelled_id, "")
    await servers.store.remove(removed_id, "")
    for job in jobs:
        if has_begun:
            await server.append_events(job, [RUNNING])
        await server.requeue(job, has_begun=has_begun, was_interrupted=has_begun)
    assert await servers.named("b").claim("m", {}) is None
    row = await servers.get(cancelled_id)
    assert (row.status, row.code, row.lease_by) == ("CANCELLED", "job_cancelled", None)
    assert row.expires_at is not None
    assert (await servers.store.events(cancelled_id, "", after=0, limit=9)).events[-1].status == "CANCELLED"
    assert [job.id for job in await servers.store.remove_expired(0)] == [removed_id]


class CountingStore(JobStore):
    """Counts what it is asked."""

    num_reads = 0
    num_looks = 0

    async def events(self, job_id: str, owner: str, *, after: int, limit: int) -> EventPage:
        self.num_reads += 1
        return await super().events(job_id, owner, after=after, limit=limit)

    async def num_events(self, ids: list[str]) -> dict[str, int]:
        self.num_looks += 1
        return await super().num_events(ids)


@pytest.fixture
async def store(database: Database) -> CountingStore:
    made = CountingStore(database, "", waiting=Limit("jobs", 100), ttl_s=60)
    await made.accept(NewJob("job", "", "m", SUMMARY, "0", 1, None, reruns=False))
    return made


@pytest.fixture
async def feed(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JobFeed]:
    monkeypatch.setattr(job_feed, "_LOOK_S", 0.02)
    made = JobFeed(store)
    yield made
    await made.close()


async def listed(feed: JobFeed, after: int = 0) -> list[JobEvent]:
    return [event async for event in feed.follow("job", "", after)]


@pytest.mark.parametrize("after", [2, 3, 2**31 - 1])
async def test_an_up_to_date_follower_reads_nothing_until_there_is_more(
    feed: JobFeed, store: CountingStore, after: int
):
    following = asyncio.create_task(listed(feed, after))
    await wait_for_async(lambda: store.num_looks >= 5)
    assert store.num_reads == 1
    await store.cancel("job", "")
    assert [event.id for event in await asyncio.wait_for(following, 10)] == [3] * (after == 2)
    assert store.num_reads == 2
    # And of a job that has ended nothing is waited for.
    assert await listed(feed, max(after, 3)) == []


async def test_events_read_by_one_follower_reach_the_others(feed: JobFeed, store: CountingStore):
    first = asyncio.create_task(listed(feed))
    await wait_for_async(lambda: store.num_looks >= 1)
    await store.cancel("job", "")
    assert len(await listed(feed)) == 3
    assert len(await asyncio.wait_for(first, 10)) == 3
