"""Detection of a hanging engine, which vLLM does not detect, by a probe that it leaves unanswered.

The engine answers probes between two steps, so a step that takes too long shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

_NUM_INTERVALS: Final = 20
"""The number of intervals into which the time limit is divided."""


async def stalled(probe: Callable[[], Awaitable[Any]], limit_s: Callable[[], float]) -> None:
    """Return once the engine has left a probe unanswered for too long; any answer, an error too, is one.

    Time is counted in intervals in which this task itself ran: a suspended machine or a frozen container
    stops both sides, and neither has stalled.
    """
    while True:
        task = asyncio.ensure_future(probe())
        try:
            waited_s = 0.0
            while not task.done():
                limit = limit_s()
                if waited_s >= limit:
                    return
                await asyncio.wait({task}, timeout=limit / _NUM_INTERVALS)
                waited_s += limit / _NUM_INTERVALS
            if not task.cancelled():
                task.exception()  # marks the exception as retrieved
        finally:
            task.cancel()
        await asyncio.sleep(limit_s() / _NUM_INTERVALS)


__all__ = ["stalled"]
