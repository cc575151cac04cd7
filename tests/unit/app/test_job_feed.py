"""Followers of jobs that another server runs: woken by what the database has for them, and only by that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api_schemas.jobs import JobEvent, JobSummary
from app.allowance import Allowance
from app.services.jobs import feed as job_feed
from app.services.jobs.feed import JobFeed
from app.storage.database import Database
from app.storage.jobs.store import EventPage, JobStore, NewJob
from tests.waiting import wait_for_async

SUMMARY = JobSummary(model="m", dialect="vllm", kind="trace", num_blocks=1, python="3.12", client="1")


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
async def store(tmp_path: Path) -> AsyncIterator[CountingStore]:
    database = Database(tmp_path)
    await database.start()
    made = CountingStore(database, waiting=Allowance.of("jobs", 100), ttl_s=60)
    await made.accept(NewJob("job", "", "m", SUMMARY, "0", 1, None, reruns=False))
    yield made
    await database.close()


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
    assert await listed(feed, after + 1) == []


async def test_events_read_by_one_follower_reach_the_others(feed: JobFeed, store: CountingStore):
    first = asyncio.create_task(listed(feed))
    await wait_for_async(lambda: store.num_looks >= 1)
    await store.cancel("job", "")
    assert len(await listed(feed)) == 3
    assert len(await asyncio.wait_for(first, 10)) == 3
