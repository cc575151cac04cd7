"""Work is done only for as long as somebody waits for it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from app.disconnect import while_connected


async def never() -> Message:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def at_once() -> Message:
    return {"type": "http.disconnect"}


async def test_the_result_comes_back_while_the_client_stays():
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await while_connected(never, work()) == 7


async def test_an_error_of_the_work_is_raised_as_it_is():
    async def work() -> int:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await while_connected(never, work())


async def test_a_client_that_leaves_cancels_the_work_and_its_clean_up_may_await():
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            cleaned = True

    with pytest.raises(ClientDisconnect):
        await while_connected(at_once, work())
    assert cleaned


async def test_cancelling_the_caller_cancels_the_work():
    is_cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    caller = asyncio.create_task(while_connected(never, work()))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert is_cancelled.is_set()
