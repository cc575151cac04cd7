"""Waiting in tests for what tells nobody that it has happened."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, overload

_T = TypeVar("_T")
_TIMEOUT_S: Final = 60.0
"""Against hanging: long enough for a busy machine."""
_INTERVAL_S: Final = 0.01


def wait_for(condition: Callable[[], _T], timeout_s: float = _TIMEOUT_S, what: str = "") -> _T:
    """Ask a condition until it holds, and return what it returned then; fails after a time."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise AssertionError(_late(what, timeout_s, value))
        time.sleep(_INTERVAL_S)
    return value


@overload
async def wait_for_async(
    condition: Callable[[], Awaitable[_T]], timeout_s: float = ..., what: str = ...
) -> _T: ...
@overload
async def wait_for_async(condition: Callable[[], _T], timeout_s: float = ..., what: str = ...) -> _T: ...
async def wait_for_async(condition: Callable[[], Any], timeout_s: float = _TIMEOUT_S, what: str = "") -> Any:
    """The same in an event loop; the condition may be a coroutine function."""
    value = None
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while True:
                asked = condition()
                value = await asked if inspect.isawaitable(asked) else asked
                if value:
                    return value
                await asyncio.sleep(_INTERVAL_S)
    except TimeoutError as error:
        if limit.expired():
            raise AssertionError(_late(what, timeout_s, value)) from error
        raise


def _late(what: str, timeout_s: float, value: object) -> str:
    return f"{what or 'the condition'}: not within {timeout_s:g} s; last it was {value!r}"
