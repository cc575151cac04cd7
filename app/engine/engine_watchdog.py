"""An engine that lives and does nothing: noticed because it leaves a question unanswered.

vLLM notices a process that ends. One that hangs, in a driver, a lock or a network, keeps its requests waiting
for ever, and says nothing. It answers questions between two steps, so a step that takes too long shows, and
an engine without requests answers at once. ``VLLMEngineClient`` asks, and ends one that has stalled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

_LOOKS: Final = 20
"""The parts of the time that an engine has."""


async def stalled(ask: Callable[[], Awaitable[Any]], limit_s: Callable[[], float]) -> None:
    """Wait until an engine has taken too long for an answer; for ever where it never does.

    The time is counted in parts in which this ran itself: a machine that sleeps, or a container that is
    frozen, stops both sides, and none has stalled.

    Args:
        ask: Asks it something. What it answers, an error too, says that it lives.
        limit_s: How long it may take now.
    """
    while True:
        asking = asyncio.ensure_future(ask())
        try:
            waited_s = 0.0
            while not asking.done():
                limit = limit_s()
                if waited_s >= limit:
                    return
                await asyncio.wait({asking}, timeout=limit / _LOOKS)
                waited_s += limit / _LOOKS
            if not asking.cancelled():
                asking.exception()  # it has been looked at
        finally:
            asking.cancel()
        await asyncio.sleep(limit_s() / _LOOKS)


__all__ = ["stalled"]
