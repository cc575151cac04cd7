"""Cancellation of work when the client disconnects or the request's deadline has passed.

It is asyncio's own and arrives once, so that an engine may await in ``finally``; anyio's task groups, which
starlette's streaming response uses, would cancel those awaits too.
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
    receive: Receive, work: Coroutine[Any, Any, T], deadline: RequestDeadline | None = None
) -> T:
    """Run ``work``; cancel it, wait for it, and raise if the client disconnects or the deadline is reached.

    The request's body must have been read: other messages are discarded.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(disconnected(receive))
    waited_for: list[asyncio.Future[Any]] = [working, watching]
    if deadline is not None:
        waited_for.append(deadline.reached)
    try:
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if deadline is not None and deadline.error is not None:
            raise deadline.error
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects; discards other messages."""
    while (await receive())["type"] != "http.disconnect":
        pass
