"""Comments in streams of events that are idle, so that no proxy takes them for dead; clients ignore them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, TypeVar

from starlette.types import Message, Send

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMMENT: Final = ": keep-alive\n\n"
_MESSAGE: Final[Message] = {"type": "http.response.body", "body": COMMENT.encode(), "more_body": True}
_EVENTS: Final = b"text/event-stream"
_END_OF_EVENT: Final = b"\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """A stream that has begun; ``first`` is None if it has no event."""

    first: str | None
    rest: AsyncIterator[str] | None


class KeepAlive:
    """Sends the messages of one response, and a comment after each interval without any."""

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._turn = asyncio.Lock()
        self._num_sent = 0
        self._is_between_events = True
        self._commenting: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        async with self._turn:
            await self._send(message)
        self._num_sent += 1
        if message["type"] == "http.response.start":
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            if kind.startswith(_EVENTS):
                self._commenting = asyncio.create_task(self._comment(), name="keep-alive")
        elif not message.get("more_body", False):
            self.close()
        elif self._commenting is not None:
            self._is_between_events = message["body"].endswith(_END_OF_EVENT)

    def close(self) -> None:
        if self._commenting is not None:
            self._commenting.cancel()

    async def _comment(self) -> None:
        while True:
            num_seen = self._num_sent
            await asyncio.sleep(self._interval_s)
            async with self._turn:
                if num_seen == self._num_sent and self._is_between_events:
                    try:
                        await self._send(_MESSAGE)
                    except Exception:  # the client has left, as the stream will notice
                        logger.debug("a comment was not sent", exc_info=True)
                        return


async def within(work: Coroutine[Any, Any, T], time_s: float) -> T | asyncio.Task[T]:
    """Return the result of ``work``, or its task if it takes longer; no limit if ``time_s`` is 0."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=time_s or None)
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    return task.result() if task.done() else task


class LateStream:
    """A stream that has not begun yet; closing it cancels its beginning."""

    def __init__(self, beginning: asyncio.Task[Begun]) -> None:
        self._beginning = beginning
        self._has_begun = False

    def __aiter__(self) -> LateStream:
        return self

    async def __anext__(self) -> str:
        begun = await self._beginning
        if begun.first is None or begun.rest is None:
            raise StopAsyncIteration
        if not self._has_begun:
            self._has_begun = True
            return begun.first
        return await anext(begun.rest)

    async def aclose(self) -> None:
        self._beginning.cancel()
        (begun,) = await asyncio.gather(self._beginning, return_exceptions=True)
        aclose = getattr(getattr(begun, "rest", None), "aclose", None)
        if aclose is not None:
            await aclose()


__all__ = ["COMMENT", "Begun", "KeepAlive", "LateStream", "within"]
