"""A trace's requests together: one stream, an orderly end however it comes, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nnsight_engine.remote_backend.backpressure import Backpressure, SlowReaderError
from nnsight_engine.vllm_backend.running_trace import Output, RunningTrace, TraceStarted
from nnsight_engine.vllm_backend.trace_router import TraceEvent, TraceRouter


class Engine:
    """Makes requests whose outputs a test decides."""

    def __init__(self, max_bytes: int = 2**30) -> None:
        self.router = TraceRouter(Backpressure(max_bytes))
        self.num_running = 0

    def request(
        self, *steps: Any, key: str = "key"
    ) -> Callable[[Callable[[], None]], AsyncGenerator[Any, None]]:
        """Return a request: an output for each number, news for bytes, an error for an exception."""

        async def outputs(come: Callable[[], None]) -> AsyncGenerator[Any, None]:
            self.num_running += 1
            try:
                come()
                for step in steps:
                    await asyncio.sleep(0)
                    if isinstance(step, bytes):
                        self.router.deliver([(key, 0, step, "")], 0)
                    elif isinstance(step, Exception):
                        raise step
                    else:
                        choice = SimpleNamespace(index=0, token_ids=list(range(step)))
                        yield SimpleNamespace(outputs=[choice], finished=step == steps[-1])
            finally:
                self.num_running -= 1

        return outputs


async def events(trace: RunningTrace) -> list[Any]:
    async with contextlib.aclosing(trace.events()) as running:
        return [event async for event in running]


async def test_all_outputs_come_and_what_is_told_comes_before_its_output() -> None:
    engine = Engine()
    trace = RunningTrace(engine.router, "key", [engine.request(b"one", 1, b"two", 2), engine.request(1)])
    seen = await events(trace)
    assert [type(event) for event in seen[:1]] == [TraceStarted]
    assert sorted(event.block for event in seen if isinstance(event, Output)) == [0, 0, 1]
    first = [event for event in seen if not isinstance(event, TraceStarted) and event.block == 0]
    assert [event.delta if isinstance(event, TraceEvent) else "output" for event in first] == [
        *(b"one", "output"),
        *(b"two", "output"),
    ]
    assert len(engine.router) == 0


async def test_one_that_fails_ends_all() -> None:
    engine = Engine()
    endless = engine.request(*range(1, 10_000))
    trace = RunningTrace(engine.router, "key", [endless, engine.request(1, ValueError("no"))])
    with pytest.raises(ValueError, match="no"):
        await events(trace)
    assert (engine.num_running, len(engine.router)) == (0, 0)


async def test_left_early_nothing_goes_on() -> None:
    engine = Engine()
    trace = RunningTrace(engine.router, "key", [engine.request(*range(1, 10_000)) for _ in range(3)])
    async with contextlib.aclosing(trace.events()) as running:
        async for event in running:
            if isinstance(event, Output):
                break
    assert (engine.num_running, len(engine.router)) == (0, 0)


async def test_a_slow_reader_holds_up_his_own_requests_and_is_told_no_more_than_the_limit() -> None:
    engine = Engine()
    steps = [step for number in range(1, 50) for step in (b"x" * 100, number)]
    trace = RunningTrace(engine.router, "key", [engine.request(*steps)], max_pending_bytes=150)
    async with contextlib.aclosing(trace.events()) as running:
        seen = [await anext(running) for _ in range(3)]
        for _ in range(100):
            await asyncio.sleep(0)  # the request is at its next output and goes no further
        assert isinstance(seen[-1], Output)
        rest = [event async for event in running]
    assert len([event for event in rest if isinstance(event, Output)]) == 48
    greedy = engine.request(*[b"x" * 100] * 5, 1)
    running = RunningTrace(engine.router, "key", [greedy], max_pending_bytes=150).events()
    await anext(running)
    for _ in range(100):
        await asyncio.sleep(0)
    with pytest.raises(SlowReaderError, match="150 bytes"):
        _ = [event async for event in running]


async def test_the_slowest_of_many_goes_so_that_all_together_keep_to_the_limit() -> None:
    engine = Engine(max_bytes=1000)
    slow = [
        RunningTrace(
            engine.router, key, [engine.request(*[b"x" * 100] * num, *range(1, 9), key=key)]
        ).events()
        for key, num in (("much", 6), ("less", 3))
    ]
    quick = [b"y" * 300, 1, b"y" * 300, 2]
    for running in slow:
        await anext(running)
        for _ in range(50):
            await asyncio.sleep(0)
    assert engine.router._unread.num_bytes == 900
    seen = await events(RunningTrace(engine.router, "quick", [engine.request(*quick, key="quick")]))
    assert [event.delta for event in seen if isinstance(event, TraceEvent)] == [b"y" * 300] * 2
    assert engine.num_running == 1, "the request of whom the most waited has ended"
    with pytest.raises(SlowReaderError, match="of all traces"):
        await anext(slow[0])
    rest = [event async for event in slow[1]]
    assert len([event for event in rest if isinstance(event, TraceEvent)]) == 3
    assert (engine.num_running, len(engine.router), engine.router._unread.num_bytes) == (0, 0, 0)


async def test_what_is_told_of_other_traces_or_fails_to_be_taken_harms_nobody() -> None:
    router = TraceRouter()

    def broken(told: TraceEvent) -> None:
        raise RuntimeError("a listener's fault")

    router.open("mine", broken, lambda _: None)
    router.deliver([("mine", 0, b"x", ""), ("another's", 0, b"x", "")], 0)
