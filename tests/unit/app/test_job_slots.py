"""Places of jobs: who waits for an engine leaves theirs, and has it back before others get one."""

from __future__ import annotations

import asyncio

from app.services.jobs.slots import JobSlots

KIND = ("vllm", "trace")


async def test_a_waiting_job_releases_its_slot_and_resumes_first():
    slots = JobSlots(1, lambda: None)
    first = await slots.take()
    assert (slots.are_taken, slots.waiting) == (True, [])
    waiting = asyncio.create_task(first.wait(KIND, 0))
    await asyncio.sleep(0)
    assert (slots.are_taken, slots.waiting) == (False, [KIND])
    second = await slots.take()
    for _ in range(5):
        await asyncio.sleep(0)
    # It would go on, and has no place to.
    assert (waiting.done(), slots.are_taken) == (False, True)
    second.release()
    await waiting
    # It may be refused again; until it is taken no more of its kind are wanted.
    assert slots.waiting == [KIND]
    first.accepted()
    assert (slots.are_taken, slots.waiting) == (True, [])
    first.release()
    first.release()
    assert (slots.are_taken, slots.waiting) == (False, [])


async def test_a_job_that_ends_while_it_waits_leaves_nothing():
    news: list[None] = []
    slots = JobSlots(1, lambda: news.append(None))
    jobs = [await slots.take()]
    waits = [asyncio.create_task(jobs[0].wait(KIND, 60))]
    await asyncio.sleep(0)
    jobs.append(await slots.take())
    waits.append(asyncio.create_task(jobs[1].wait(KIND, 0)))
    await asyncio.sleep(0)
    for job, waiting in zip(jobs, waits, strict=True):
        assert slots.waiting == [KIND]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        job.release()
    assert (slots.waiting, slots.are_taken, len(news)) == ([], False, 4)
