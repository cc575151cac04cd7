"""Streams to the client: the source is always closed, and the client always receives the error.

An error before the first event still gets its own HTTP status; a later one becomes an event in OpenAI's error
format and ``[DONE]``, as in vLLM. A client's disconnect closes the source at once. Idle streams of events get
comments, which clients ignore, so that no proxy takes them for dead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from api_schemas.errors import ApiError, ErrorCode
from app.http.contexts import RequestContext, context_of, note_error
from app.http.deadlines import RequestDeadline, while_connected
from app.http.errors import DONE_FRAME, error_frame, internal_error

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


_FINAL_EVENT_S: Final = 2.0
_LOOKS: Final = 2
"""The number of intervals into which the stall timeout is divided."""


def last_events(error: ApiError) -> bytes:
    """Return the error as the last events of OpenAI's streams."""
    return f"{error_frame(error)}{DONE_FRAME}".encode()


class ClosingStream(StreamingResponse):
    """A stream whose source is closed however it ends: completion, an error or a disconnect.

    Args:
        on_close: Awaited last. A generator that was never started does not run its ``finally``, so the
            resources that it was to close must be closed here.
        stall_s: The time after which a client that reads nothing counts as disconnected; None for no limit.
        final_event: Returns the last bytes of a stream that an error ends; None to break it off.
    """

    def __init__(
        self,
        source: AsyncGenerator[str, None]
        | AsyncGenerator[bytes, None]
        | AsyncGenerator[bytes | memoryview, None],
        *,
        media_type: str,
        headers: dict[str, str] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
        status_code: int = 200,
        stall_s: float | None = None,
        final_event: Callable[[ApiError], bytes] | None = None,
        keep_alive_s: float = 0.0,
    ) -> None:
        super().__init__(source, status_code, headers=headers, media_type=media_type)
        self._source = source
        self._on_close = on_close
        self._stall_s = stall_s
        self._final_event = final_event
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = context_of(scope).deadline
        sending = Sending(send, deadline, self._stall_s, self._keep_alive_s)
        try:
            await while_connected(receive, self.stream_response(sending.send), deadline)
        except OSError as error:
            # An ASGI server of a newer version raises this when the connection is closed.
            raise ClientDisconnect from error
        except ApiError as error:
            if error is not deadline.error or not sending.has_started:
                raise
            if self._final_event is None or sending.is_stalled:
                raise ClientDisconnect from error
            logger.info("stream ended with %s: %s", error.code, error.message)
            note_error(scope, error.code)
            sending.close()
            await send_final(self._final_event(error), send)
        finally:
            sending.close()
            try:
                await self._source.aclose()
            finally:
                if self._on_close is not None:
                    await self._on_close()


class Sending:
    """Sends the messages of one response and detects a client that reads nothing (``is_stalled``).

    A timeout for each token would be most of our overhead on a stream: one timer polls the progress instead.
    """

    def __init__(
        self, send: Send, deadline: RequestDeadline, stall_s: float | None, keep_alive_s: float = 0.0
    ) -> None:
        self._keep_alive = KeepAlive(send, keep_alive_s) if keep_alive_s else None
        self._send = send if self._keep_alive is None else self._keep_alive.send
        self._deadline = deadline
        self._pause_s = 0.0 if stall_s is None else stall_s / _LOOKS
        self._is_sending = False
        self._num_sent = self._num_seen = self._num_looks = 0
        self._timer: asyncio.TimerHandle | None = None
        self.has_started = False
        self.is_stalled = False
        if self._pause_s:
            self._wait()

    async def send(self, message: Message) -> None:
        """Send a message; waits while the client has not read the earlier ones."""
        self._is_sending = True
        await self._send(message)
        self._is_sending, self.has_started = False, True
        self._num_sent += 1

    def close(self) -> None:
        if self._keep_alive is not None:
            self._keep_alive.close()
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._check_progress)

    def _check_progress(self) -> None:
        moves = not self._is_sending or self._num_sent != self._num_seen
        self._num_looks = 0 if moves else self._num_looks + 1
        self._num_seen = self._num_sent
        if self._num_looks < _LOOKS:
            self._wait()
            return
        logger.info("a client read nothing of its response for %g s", self._pause_s * _LOOKS)
        self.is_stalled = True
        self._deadline.end(ApiError(ErrorCode.REQUEST_TIMED_OUT, "The client does not read the response."))


async def send_final(last: bytes, send: Send) -> None:
    """Send the end of a stream; raises ClientDisconnect if the client does not read it."""
    try:
        async with asyncio.timeout(_FINAL_EVENT_S):
            await send({"type": "http.response.body", "body": last, "more_body": False})
    except OSError as error:  # closed, or the client reads nothing
        raise ClientDisconnect from error


async def first_event(stream: AsyncIterator[str]) -> str | None:
    """Return the stream's first event, or None if it is empty; closes the stream on an error."""
    try:
        return await anext(stream, None)
    except BaseException:
        await close_stream(stream)
        raise


async def events(
    first: str | None,
    stream: AsyncIterator[str],
    context: RequestContext,
    saw: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator[str, None]:
    """Yield ``first`` and the rest of the stream; turn an error into its last two events.

    ``saw`` is called with each event before it is yielded, except ``first``.
    """
    try:
        if first is not None:
            yield first
            async for event in stream:
                saw(event)
                yield event
    except ApiError as error:
        logger.info("stream ended with %s: %s", error.code, error.message)
        context.record.error = error.code
        yield error_frame(error)
        yield DONE_FRAME
    except Exception:
        logger.exception("unhandled error in a stream")
        context.record.error = ErrorCode.INTERNAL
        yield error_frame(internal_error())
        yield DONE_FRAME
    finally:
        await close_stream(stream)


async def close_stream(stream: AsyncIterator[str]) -> None:
    """Close a stream if it has ``aclose``; idempotent."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()
