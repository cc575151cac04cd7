"""When an engine counts as hung: it leaves a question unanswered, and not for want of time of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import pytest

from app.engine.engine_watchdog import stalled


async def is_noticed(ask: Callable[[], asyncio.Future[object]], limit_s: float, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await stalled(ask, lambda: limit_s)
    except TimeoutError:
        return False
    return True


def asking(*answers_s: float) -> Callable[[], asyncio.Future[object]]:
    """Answer after so many seconds each, the last from then on."""
    left = list(answers_s)

    def ask() -> asyncio.Future[object]:
        return asyncio.ensure_future(asyncio.sleep(left.pop(0) if len(left) > 1 else left[0]))

    return ask


async def test_an_engine_that_answers_in_time_has_not_stalled_however_often_it_is_asked() -> None:
    assert not await is_noticed(asking(0.1), limit_s=0.6, within_s=1.5)


@pytest.mark.parametrize("answers_s", [(60,), (0.0, 0.05, 60)])
async def test_one_that_does_not_answer_has(answers_s: tuple[float, ...]) -> None:
    begin = time.monotonic()
    assert await is_noticed(asking(*answers_s), limit_s=0.2, within_s=50)
    assert time.monotonic() - begin >= 0.2


async def test_an_error_is_an_answer() -> None:
    async def fail() -> None:
        raise RuntimeError("no such thing")

    assert not await is_noticed(lambda: asyncio.ensure_future(fail()), limit_s=0.1, within_s=0.5)


async def test_what_blocks_may_take_is_waited_for_as_long_as_they_are_there() -> None:
    limits = [1.0]
    waiting = asyncio.create_task(stalled(asking(60), lambda: limits[0]))
    await asyncio.sleep(0.4)
    assert not waiting.done()
    limits[0] = 0.1
    await asyncio.wait_for(waiting, 50)


async def test_time_in_which_no_thread_ran_does_not_count() -> None:
    """As where a machine sleeps, or a container is frozen, with the engine in it."""
    waiting = asyncio.create_task(stalled(asking(60), lambda: 0.5))
    await asyncio.sleep(0.1)
    time.sleep(1)  # noqa: ASYNC251 - that is what is tested
    await asyncio.sleep(0.1)
    assert not waiting.done()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
