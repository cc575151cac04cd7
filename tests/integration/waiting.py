"""Polling in tests for conditions without a notification."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until a condition holds; fails where that takes too long."""

    async def check() -> bool:
        return condition()

    await until_async(check, timeout_s)


async def until_async(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60) -> None:
    """The same for a condition that has to be asked for."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
