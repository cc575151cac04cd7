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

from api_schemas.errors import ApiError
from app.errors import DONE_FRAME, error_frame, internal_error
from app.services.disconnect import while_connected

logger = logging.getLogger(__name__)

DOWNLOAD_STALL_S: Final = 60.0
"""A file that is removed keeps its room for as long as it is read, so nobody reads one for ever."""


class ClosingStream(StreamingResponse):
    """A stream whose source is closed on every way out: its end, an error, a client that left.

    Args:
        source: Yields the content.
        media_type: Content type.
        headers: More headers.
        on_close: Awaited last. A generator that was never started has no ``finally`` to run, so what it
            was to close must be closed here.
        status_code: HTTP status.
        stall_s: How long the client may take none of it before it counts as gone; None for as long as it
            likes.
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
    ) -> None:
        """Take over ``source``."""
        super().__init__(source, status_code, headers=headers, media_type=media_type)
        self._source = source
        self._on_close = on_close
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or the client leaves."""
        del scope

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._stall_s):
                await send(message)

        try:
            # One timeout for each token would be most of what we add to a stream, and none is asked for.
            await while_connected(
                receive, self.stream_response(send if self._stall_s is None else send_in_time)
            )
        except OSError as error:
            # It took nothing for too long, or the server, of a newer ASGI version, can send no more.
            raise ClientDisconnect from error
        finally:
            await self._source.aclose()
            if self._on_close is not None:
                await self._on_close()


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
