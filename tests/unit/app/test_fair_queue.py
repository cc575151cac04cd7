"""Senders take turns, whatever each of them sends."""

from __future__ import annotations

import asyncio

from app.admission.fair_queue import FairQueue


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
