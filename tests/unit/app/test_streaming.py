"""Streams are closed on every way out, and errors in them are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Self, cast

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope

from api_schemas.errors import ApiError, ErrorCode
from app.request_context import RequestContext, begin_context, context_of
from app.services.streaming import ClosingStream, events, first_event, last_events


class Source:
    """A stream of events that knows whether it was closed, and may fail at the end."""

    def __init__(self, *items: str, error: Exception | None = None) -> None:
        self.num_closed = 0
        self._items = list(items)
        self._error = error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._items:
            return self._items.pop(0)
        raise self._error or StopAsyncIteration

    async def aclose(self) -> None:
        self.num_closed += 1


def begun() -> Scope:
    scope: Scope = {"type": "http", "method": "GET"}
    begin_context(scope)
    return scope


def asked() -> RequestContext:
    return begin_context({"type": "http", "method": "POST"})


async def never() -> Message:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def gone() -> Message:
    return {"type": "http.disconnect"}


async def test_a_stalled_download_is_closed():
    async def content() -> AsyncGenerator[bytes, None]:
        for _ in range(10):
            yield bytes(1000)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    closed = []

    async def on_close() -> None:
        closed.append(True)

    stream = ClosingStream(content(), media_type="text/plain", on_close=on_close, stall_s=0.01)
    with pytest.raises(ClientDisconnect):
        await stream(begun(), never, send)
    assert closed == [True]


async def test_a_slow_download_is_not_closed():
    sent: list[Message] = []

    async def content() -> AsyncGenerator[bytes, None]:
        for number in range(50):
            if number == 25:
                await asyncio.sleep(0.6)  # now it is the engine that takes long
            yield bytes(10)

    async def send(message: Message) -> None:
        await asyncio.sleep(0.01)
        sent.append(message)

    await ClosingStream(content(), media_type="text/plain", stall_s=0.4)(begun(), never, send)
    assert len(sent) == 52


async def test_a_stream_that_is_ended_says_why():
    scope = begun()
    deadline = context_of(scope).deadline
    error = ApiError(ErrorCode.DRAINING, "The server goes.")
    sent: list[Message] = []

    async def content() -> AsyncGenerator[str, None]:
        yield "a"
        deadline.end(error)
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    async def stuck(message: Message) -> None:
        await asyncio.Event().wait()

    stream = ClosingStream(content(), media_type="text/event-stream", final_event=last_events)
    await stream(scope, never, send)
    assert sent[-1]["body"].endswith(b"data: [DONE]\n\n")
    assert b'"code":"draining"' in sent[-1]["body"]
    # What has no end of that kind breaks off, and what has not begun is an error like any other.
    with pytest.raises(ClientDisconnect):
        await ClosingStream(content(), media_type="text/plain")(scope, never, send)
    with pytest.raises(ApiError, match="The server goes"):
        await ClosingStream(content(), media_type="text/plain")(scope, never, stuck)


async def test_events_end_and_close():
    source = Source("a", "b")
    assert [event async for event in events(await first_event(source), source, asked())] == ["a", "b"]
    assert source.num_closed == 1


async def test_a_failing_first_event_closes_the_stream():
    source = Source(error=RuntimeError("no"))
    with pytest.raises(RuntimeError):
        await first_event(source)
    assert source.num_closed == 1


async def test_an_error_becomes_two_events_and_closes_the_stream():
    source = Source("a", error=RuntimeError("no"))
    first, failure, done = [event async for event in events(await first_event(source), source, asked())]
    assert first == "a"
    assert '"code":"internal_error"' in failure
    assert done == "data: [DONE]\n\n"
    assert source.num_closed == 1


async def test_an_empty_stream_stays_empty():
    source = Source()
    assert [event async for event in events(await first_event(source), source, asked())] == []


async def test_leaving_the_events_early_closes_the_stream():
    source = Source("a", "b")
    iterator = events(await first_event(source), source, asked())
    assert await anext(iterator) == "a"
    await iterator.aclose()
    assert source.num_closed == 1


async def respond(content: AsyncGenerator[str, None], on_send: Exception | None = None) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        if on_send is not None:
            raise on_send
        sent.append(message)

    await ClosingStream(content, media_type="text/event-stream")(begun(), never, send)
    return sent


async def test_a_response_sends_everything_and_closes_its_source():
    is_closed = False

    async def content() -> AsyncGenerator[str, None]:
        nonlocal is_closed
        try:
            yield "é"
        finally:
            is_closed = True

    sent = await respond(content())
    assert [message.get("body") for message in sent] == [None, "é".encode(), b""]
    assert is_closed


async def test_a_socket_that_takes_no_more_is_a_client_that_left():
    async def content() -> AsyncGenerator[str, None]:
        yield "a"

    with pytest.raises(ClientDisconnect):
        await respond(content(), BrokenPipeError())


async def test_what_a_source_holds_is_closed_even_when_it_was_never_started():
    num_closed = 0

    async def content() -> AsyncGenerator[str, None]:
        yield "a"

    async def on_close() -> None:
        nonlocal num_closed
        num_closed += 1

    async def send(message: Message) -> None:
        await asyncio.Event().wait()

    response = ClosingStream(content(), media_type="text/event-stream", on_close=on_close)
    with pytest.raises(ClientDisconnect):
        await response(begun(), gone, send)
    assert num_closed == 1


async def test_a_stream_without_a_close_is_fine():
    class Bare:
        def __aiter__(self) -> AsyncIterator[str]:
            return self

        async def __anext__(self) -> str:
            raise StopAsyncIteration

    assert await first_event(Bare()) is None
    assert [event async for event in events(None, Bare(), asked())] == []


async def test_what_a_stream_holds_is_released_also_when_its_source_cannot_be_closed():
    class Unclosable:
        def __aiter__(self) -> Self:
            return self

        async def __anext__(self) -> str:
            raise StopAsyncIteration

        async def aclose(self) -> None:
            raise RuntimeError("it is stuck")

    closed = []

    async def on_close() -> None:
        closed.append(True)

    async def send(message: Message) -> None:
        pass

    source = cast("AsyncGenerator[str, None]", Unclosable())
    with pytest.raises(RuntimeError, match="it is stuck"):
        await ClosingStream(source, media_type="text/plain", on_close=on_close)(begun(), never, send)
    assert closed == [True]
