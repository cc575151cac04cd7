"""Streams to the client: whatever happens, the source is closed and the client is told.

An error before the first event still gets its own HTTP status; one after it becomes an event of
OpenAI's error shape and ``[DONE]``, as in vLLM. A client that leaves ends the source at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from api_schemas.errors import ApiError, ErrorCode
from app.cutoff import Cutoff, cutoff_of
from app.errors import DONE_FRAME, error_frame, internal_error
from app.services.disconnect import while_connected

logger = logging.getLogger(__name__)

_LAST_WORDS_S: Final = 2.0
_LOOKS: Final = 2
"""Into how many parts the time is cut for which a client may take nothing."""


def last_events(error: ApiError) -> bytes:
    """Return the error as the last events of OpenAI's streams."""
    return f"{error_frame(error)}{DONE_FRAME}".encode()


class ClosingStream(StreamingResponse):
    """A stream whose source is closed on every way out: its end, an error, a client that left.

    Args:
        source: Yields the content.
        media_type: Content type.
        headers: More headers.
        on_close: Awaited last. A generator that was never started has no ``finally`` to run, so what it
            was to close must be closed here.
        status_code: HTTP status.
        stall_s: How long the client may take none of it before it counts as gone: memory, files and places
            are held for as long as somebody reads. None for as long as it likes.
        last_words: Makes the end of a stream out of the error that ends it before its time; None where it
            just breaks off.
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
        last_words: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        """Take over ``source``."""
        super().__init__(source, status_code, headers=headers, media_type=media_type)
        self._source = source
        self._on_close = on_close
        self._stall_s = stall_s
        self._last_words = last_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends, is ended, or the client leaves."""
        cutoff = cutoff_of(scope) or Cutoff()
        sending = _Sending(send, cutoff, self._stall_s)
        try:
            await while_connected(receive, self.stream_response(sending.send), cutoff)
        except OSError as error:
            # The server, of a newer ASGI version, can send no more.
            raise ClientDisconnect from error
        except ApiError as error:
            if error is not cutoff.error or not sending.has_started:
                raise
            if self._last_words is None or sending.is_stalled:
                raise ClientDisconnect from error
            logger.info("stream ended with %s: %s", error.code, error.message)
            await _say(self._last_words(error), send)
        finally:
            sending.close()
            try:
                await self._source.aclose()
            finally:
                if self._on_close is not None:
                    await self._on_close()


class _Sending:
    """What is sent of one response, and whether its client takes any of it.

    One timeout for each token would be most of what we add to a stream: a timer looks at it instead.

    Attributes:
        has_started: Whether the status is on its way.
        is_stalled: Whether the client took nothing for too long.
    """

    def __init__(self, send: Send, cutoff: Cutoff, stall_s: float | None) -> None:
        self._send = send
        self._cutoff = cutoff
        self._pause_s = 0.0 if stall_s is None else stall_s / _LOOKS
        self._is_sending = False
        self._num_sent = self._num_seen = self._num_looks = 0
        self._timer: asyncio.TimerHandle | None = None
        self.has_started = False
        self.is_stalled = False
        if self._pause_s:
            self._wait()

    async def send(self, message: Message) -> None:
        """Send a message on; waits for as long as the client has not taken what came before."""
        self._is_sending = True
        await self._send(message)
        self._is_sending, self.has_started = False, True
        self._num_sent += 1

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _look(self) -> None:
        moves = not self._is_sending or self._num_sent != self._num_seen
        self._num_looks = 0 if moves else self._num_looks + 1
        self._num_seen = self._num_sent
        if self._num_looks < _LOOKS:
            self._wait()
            return
        logger.info("a client took nothing of its answer for %g s", self._pause_s * _LOOKS)
        self.is_stalled = True
        self._cutoff.end(ApiError(ErrorCode.REQUEST_TIMED_OUT, "The client takes nothing of its answer."))


async def _say(last: bytes, send: Send) -> None:
    """Send the end of a stream, if the client takes it."""
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await send({"type": "http.response.body", "body": last, "more_body": False})
    except OSError as error:  # it takes nothing
        raise ClientDisconnect from error


async def first_event(stream: AsyncIterator[str]) -> str | None:
    """Return the stream's first event, or None where it has none; closes the stream if that fails."""
    try:
        return await anext(stream, None)
    except BaseException:
        await close_stream(stream)
        raise


async def events(
    first: str | None, stream: AsyncIterator[str], saw: Callable[[str], None] = lambda _: None
) -> AsyncGenerator[str, None]:
    """Yield ``first`` and the rest of the stream; turn an error into its last two events.

    Args:
        first: Which ``saw`` has been told of.
        stream: The rest.
        saw: Is told of each event before it is yielded.
    """
    try:
        if first is not None:
            yield first
            async for event in stream:
                saw(event)
                yield event
    except ApiError as error:
        logger.info("stream ended with %s: %s", error.code, error.message)
        yield error_frame(error)
        yield DONE_FRAME
    except Exception:
        logger.exception("unhandled error in a stream")
        yield error_frame(internal_error())
        yield DONE_FRAME
    finally:
        await close_stream(stream)


async def close_stream(stream: AsyncIterator[str]) -> None:
    """Close a stream where it can be closed; harmless when repeated."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()
