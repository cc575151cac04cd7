"""A trace's requests together: on one engine, one stream, an orderly end however it comes, slow readers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nnsight_engine.remote_backend.unread_output import SlowReaderError
from nnsight_engine.vllm_backend.running_trace import MergedRun, Output, TraceEvent, TraceRequests, TraceRun
from nnsight_engine.vllm_backend.tracing_async_llm import TracePlacement
from tests.unit.vllm_backend.scripted_engine import Engine


async def events(run: MergedRun) -> list[Any]:
    async with run:
        return [event async for event in run]


async def turns(number: int = 100) -> None:
    """Let other tasks run until they wait."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_at_start", [False, True])
async def test_an_error_of_one_request_ends_all(
    monkeypatch: pytest.MonkeyPatch, *, is_at_start: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no")

    engine = Engine()
    if is_at_start:
        monkeypatch.setattr(engine, "start_request", refuse)
    run = engine.run(range(1, 10_000), [1, ValueError("no")])
    async with asyncio.timeout(5):
        with pytest.raises(ValueError, match="no"):
            await events(run)
    assert (engine.num_running, len(engine.traces), engine.forgotten) == (0, 0, ["key"])
    assert run.failed == (0 if is_at_start else 1)
    assert set(engine.aborted) == {"key-0", "key-1"}


@pytest.mark.parametrize("phase", ["hold", "read"])
async def test_a_cancelled_reader_ends_the_requests(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    run = engine.run(range(1, 10_000))
    if phase == "hold":
        monkeypatch.setattr(engine, "begin_trace", never)
    task = asyncio.create_task(events(run))
    await turns(20)
    while not task.done():  # servers cancel until the task has ended
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns(20)
    assert (engine.num_running, len(engine.traces), engine.forgotten) == (0, 0, ["key"])


async def test_a_slow_reader_delays_its_own_requests_and_has_a_limit() -> None:
    engine = Engine()
    steps = [step for number in range(1, 50) for step in (b"x" * 100, number)]
    async with engine.run(steps, max_pending_bytes=150) as run:
        seen = [await anext(run) for _ in range(3)]
        await turns()  # the request is at its next output and goes no further
        assert isinstance(seen[-1], Output)
        rest = [event async for event in run]
    assert len([event for event in rest if isinstance(event, Output)]) == 48
    async with engine.run([*[b"x" * 100] * 5, 1], max_pending_bytes=150) as run:
        await anext(run)
        await turns()
        with pytest.raises(SlowReaderError, match="150 bytes"):
            _ = [event async for event in run]


async def test_the_slowest_of_many_readers_ends_when_all_together_exceed_the_limit() -> None:
    engine = Engine(max_bytes=1000)
    much = engine.run([*[b"x" * 100] * 6, *range(1, 9)], key="much")
    less = engine.run([*[b"x" * 100] * 3, *range(1, 9)], key="less")
    async with much, less:
        for run in (much, less):
            await anext(run)
            await turns(50)
        assert engine.unread.num_bytes == 900
        seen = await events(engine.run([b"y" * 300, 1, b"y" * 300, 2], key="quick"))
        assert [event.delta for event in seen if isinstance(event, TraceEvent)] == [b"y" * 300] * 2
        assert engine.num_running == 1, "the request with the most unread bytes has ended"
        with pytest.raises(SlowReaderError, match="of all traces"):
            await anext(much)
        rest = [event async for event in less]
        assert len([event for event in rest if isinstance(event, TraceEvent)]) == 3
    assert (engine.num_running, len(engine.traces), engine.unread.num_bytes) == (0, 0, 0)


async def test_events_of_other_traces_and_faults_of_a_listener_are_ignored() -> None:
    class Broken(TraceRun):
        """A listener with a fault."""

        def add_event(self, event: TraceEvent) -> None:
            raise RuntimeError("a listener's fault")

        def drop_events(self, error: SlowReaderError) -> None:
            raise NotImplementedError

    engine = Engine()
    await Broken(engine, TraceRequests("mine")).begin()
    engine.traces.deliver([("mine", 0, b"x", ""), ("another's", 0, b"x", "")], 0)
    seen = await events(engine.run([b"y", 1], key="own"))
    assert [event.delta for event in seen if isinstance(event, TraceEvent)] == [b"y"]


def test_a_trace_goes_where_the_fewest_requests_are_or_will_be() -> None:
    placement = TracePlacement(3)

    def placed(key: str, num_requests: int, *in_flight: int) -> int:
        placement.place(key, num_requests, in_flight)
        return placement.rank(key)

    assert placed("first", 1, 4, 2, 3) == 1
    placement.remove("first")
    assert [placed(key, size, 0, 0, 0) for key, size in (("a", 5), ("b", 2), ("c", 3))] == [2, 0, 1]
    assert placed("d", 1, 0, 0, 0) == 0, "they are not sent yet, and count"
    placement.remove("a")
    placement.remove("a")
    assert placed("e", 1, 0, 0, 0) == 2
