"""Stopping work nobody waits for: run something only for as long as the client is there, and may wait.

Cancellation comes once, as asyncio's own, so that an engine which cleans up in ``finally`` may
await there; anyio's task groups, as in starlette's streaming response, would cancel that too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from app.request_deadline import RequestDeadline

T = TypeVar("T")


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], cutoff: RequestDeadline | None = None
) -> T:
    """Run ``work``; when the client goes first, or the request is ended, cancel it, wait for it, and raise.

    The request's body must have been read: whatever else arrives is dropped.

    Raises:
        ClientDisconnect: The client went away before ``work`` was done.
        ApiError: ``cutoff`` came before that; its ``error``.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    waited_for: list[asyncio.Future[Any]] = [working, watching]
    if cutoff is not None:
        waited_for.append(cutoff.reached)
    try:
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if cutoff is not None and cutoff.error is not None:
            raise cutoff.error
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
