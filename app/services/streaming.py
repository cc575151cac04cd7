"""Streams to the client: the source is always closed, and the client always receives the error.

An error before the first event still gets its own HTTP status; a later one becomes an event in OpenAI's error
format and ``[DONE]``, as in vLLM. A client's disconnect closes the source at once. Idle streams of events get
comments, which clients ignore, so that no proxy takes them for dead.
A stored file is sent as a whole, or resumed from an offset (RFC 9110, section 14).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from api_schemas.errors import ApiError, ErrorCode
from app.engine.client import JsonObject
from app.http.contexts import RequestContext, RequestDeadline, context_of, note_error, while_connected
from app.http.errors import DONE_FRAME, error_frame, error_response, internal_error
from app.settings import Settings
from app.storage.open_files import OpenResult

logger = logging.getLogger(__name__)

COMMENT: Final = ": keep-alive\n\n"
_MESSAGE: Final[Message] = {"type": "http.response.body", "body": COMMENT.encode(), "more_body": True}
_EVENTS: Final = b"text/event-stream"
_END_OF_EVENT: Final = b"\n\n"
_FINAL_EVENT_S: Final = 2.0
_CHECKS: Final = 2
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
        """Send the stream; of errors only the deadline's is handled here, the source handles its own."""
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
    """Sends one response: adds comments to idle events, and detects a client that reads nothing.

    A timeout for each token would be most of our overhead on a stream: timers poll the progress instead.
    """

    def __init__(
        self, send: Send, deadline: RequestDeadline, stall_s: float | None, keep_alive_s: float = 0.0
    ) -> None:
        self._send = send
        self._deadline = deadline
        self._pause_s = 0.0 if stall_s is None else stall_s / _CHECKS
        self._keep_alive_s = keep_alive_s
        self._is_sending = False
        self._is_between_events = True
        self._num_sent = self._num_sent_before = self._num_idle_checks = 0
        self._comment: asyncio.Task[None] | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.has_started = False
        self.is_stalled = False
        if self._pause_s:
            self._watch_progress()

    async def send(self, message: Message) -> None:
        """Send a message; waits while the client has not read the earlier ones."""
        self._is_sending = True
        if self._comment is not None:
            await asyncio.wait({self._comment})
        await self._send(message)
        self._is_sending, self.has_started = False, True
        self._num_sent += 1
        if self._keep_alive_s:
            self._note_progress(message)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _note_progress(self, message: Message) -> None:
        """Note for comments whether the message ends an event, or the stream; the head starts them."""
        if message["type"] == "http.response.start":
            if dict(message.get("headers", ())).get(b"content-type", b"").startswith(_EVENTS):
                self._schedule_comment()
        elif message.get("more_body", False):
            self._is_between_events = message["body"].endswith(_END_OF_EVENT)
        else:
            self._keep_alive_s = 0.0

    def _schedule_comment(self) -> None:
        loop = asyncio.get_running_loop()
        self._timers["comment"] = loop.call_later(self._keep_alive_s, self._keep_alive, self._num_sent)

    def _keep_alive(self, num_seen: int) -> None:
        """Send a comment if nothing was sent since ``num_seen`` messages, and no event is cut by it."""
        if not self._keep_alive_s:
            return
        if num_seen == self._num_sent and self._is_between_events and not self._is_sending:
            self._comment = asyncio.create_task(self._send_comment(), name="keep-alive")
        else:
            self._schedule_comment()

    async def _send_comment(self) -> None:
        try:
            await self._send(_MESSAGE)
        except Exception:  # the client has left, as the stream will notice
            logger.debug("a comment was not sent", exc_info=True)
        else:
            self._schedule_comment()
        self._comment = None

    def _watch_progress(self) -> None:
        loop = asyncio.get_running_loop()
        self._timers["stall"] = loop.call_later(self._pause_s, self._check_progress)

    def _check_progress(self) -> None:
        """End the request if a message has been waiting for the client in all the intervals."""
        moves = not self._is_sending or self._num_sent != self._num_sent_before
        self._num_idle_checks = 0 if moves else self._num_idle_checks + 1
        self._num_sent_before = self._num_sent
        if self._num_idle_checks < _CHECKS:
            self._watch_progress()
            return
        logger.info("a client read nothing of its response for %g s", self._pause_s * _CHECKS)
        self.is_stalled = True
        self._deadline.end(ApiError(ErrorCode.REQUEST_TIMED_OUT, "The client does not read the response."))


async def send_final(content: bytes, send: Send) -> None:
    """Send the end of a stream; raises ClientDisconnect if the client does not read it."""
    try:
        async with asyncio.timeout(_FINAL_EVENT_S):
            await send({"type": "http.response.body", "body": content, "more_body": False})
    except OSError as error:  # closed, or the client reads nothing
        raise ClientDisconnect from error


@dataclasses.dataclass(frozen=True, slots=True)
class StartedAnswer:
    """A whole ``body``, or a stream that has begun; ``first_event`` is None for one without events."""

    first_event: str | None = None
    later_events: AsyncIterator[str] | None = None
    body: JsonObject | None = None


async def with_first_event(stream: AsyncIterator[str]) -> StartedAnswer:
    """Wait for the first event, so that an error before it gets its own HTTP status."""
    try:
        return StartedAnswer(await anext(stream, None), stream)
    except BaseException:
        await _close(stream)
        raise


def event_stream(
    beginning: asyncio.Task[StartedAnswer],
    context: RequestContext,
    settings: Settings,
    passed: Callable[[str], str] = lambda event: event,
) -> ClosingStream:
    """Return the response for a stream, which starts with a comment if it has not begun yet.

    ``passed`` returns what is sent for an event. After an error two more events follow.
    """

    async def close() -> None:
        """Cancel the beginning, and close the stream if it has begun."""
        beginning.cancel()
        (started,) = await asyncio.gather(beginning, return_exceptions=True)
        if isinstance(started, StartedAnswer) and started.later_events is not None:
            await _close(started.later_events)

    return ClosingStream(
        _events(beginning, context, passed, close),
        media_type="text/event-stream",
        on_close=close,
        stall_s=settings.client_stall_timeout_s,
        final_event=last_events,
        keep_alive_s=settings.sse_keep_alive_s,
    )


async def _events(
    beginning: asyncio.Task[StartedAnswer],
    context: RequestContext,
    passed: Callable[[str], str],
    close: Callable[[], Awaitable[None]],
) -> AsyncGenerator[str, None]:
    """Yield the events as they are sent, and an error as the last ones; ``close`` is awaited at the end."""
    try:
        if not beginning.done():
            yield COMMENT
        stream = await beginning
        if stream.first_event is not None and stream.later_events is not None:
            yield passed(stream.first_event)
            async for event in stream.later_events:
                yield passed(event)
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
        await close()


async def _close(stream: AsyncIterator[str]) -> None:
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()


_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


async def download(
    request: Request, file: OpenResult, *, media_type: str, tag: str, stall_s: float
) -> Response:
    """Return a file, closed when the response ends, or the one range of it that the request asks for.

    Several ranges, or a malformed one, return the whole file. ``tag`` changes with the content; a client that
    reads nothing for ``stall_s`` is disconnected.
    """
    size = file.num_bytes
    headers = {"Accept-Ranges": "bytes", "ETag": tag, "Cache-Control": "private, no-store"}
    requested = _requested_range(request, size, tag)
    start, stop = requested or (0, size)
    if requested is not None and start >= stop:
        await file.close()
        error = ApiError(
            ErrorCode.RANGE_NOT_SATISFIABLE, f"The file has {size} bytes, and the range begins behind them."
        )
        return error_response(error, {**headers, "Content-Range": f"bytes */{size}"})
    is_part = (start, stop) != (0, size)
    if is_part:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return ClosingStream(
        file.chunks(start, stop),
        status_code=206 if is_part else 200,
        media_type=media_type,
        headers={**headers, "Content-Length": str(stop - start)},
        on_close=file.close,
        stall_s=stall_s,
    )


def _requested_range(request: Request, size: int, tag: str) -> tuple[int, int] | None:
    """Return the requested range as (start, stop); None for the whole file, empty if unsatisfiable."""
    match = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if match is None or request.headers.get("if-range", tag) != tag:
        return None
    first, last = match.groups()  # positions; without the first the number of last bytes
    if first:
        stop = min(size, int(last) + 1) if last else size
        return None if last and int(last) < int(first) else (int(first), stop)
    if not last or (not size and int(last)):  # the last bytes of an empty file are all of it
        return None
    return max(0, size - int(last)), size
