"""Streams: closed on every way out, and results put into their events wherever they are cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from app.engine.call_results import InterveningApp
from app.http.contexts import begin_context
from app.services.streaming import COMMENT, ClosingStream, StartedAnswer, event_stream, with_first_event
from app.settings import Settings


class Source:
    """Yields so many chunks, pausing in the middle; cannot be closed where it has an error."""

    def __init__(self, num: int = 1, pause_s: float = 0.0, error: Exception | None = None) -> None:
        self.chunks = self.yielded(num, pause_s)
        self.error = error

    async def yielded(self, num: int, pause_s: float) -> AsyncGenerator[bytes, None]:
        for number in range(num):
            await asyncio.sleep(pause_s * (number == num // 2))
            yield b"x"

    def __aiter__(self) -> AsyncGenerator[bytes, None]:
        return self.chunks

    async def aclose(self) -> None:
        await self.chunks.aclose()
        if self.error is not None:
            raise self.error


async def never() -> Message:
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def gone() -> Message:
    return {"type": "http.disconnect"}


async def streamed(source: Any, send: Any, receive: Receive = never, stall_s: float | None = None) -> None:
    """Send a stream to its end, and see that what it holds is released once."""
    released: list[bool] = []

    async def release() -> None:
        released.append(True)

    scope: dict[str, Any] = {"type": "http", "method": "GET"}
    begin_context(scope)
    stream = ClosingStream(source, media_type="text/plain", on_close=release, stall_s=stall_s)
    try:
        await stream(scope, receive, send)
    finally:
        assert released == [True]


async def stuck(message: Message) -> None:
    if message["type"] == "http.response.body":
        await asyncio.Event().wait()


async def broken(_message: Message) -> None:
    raise BrokenPipeError


@pytest.mark.parametrize(
    ("send", "receive", "stall_s"),
    [
        (stuck, never, 0.01),  # the client reads nothing
        (stuck, gone, None),  # it has left before the first byte
        (broken, never, None),
    ],
)
async def test_a_client_that_reads_no_more_is_one_that_left(
    send: Any, receive: Receive, stall_s: float | None
) -> None:
    with pytest.raises(ClientDisconnect):
        await streamed(Source(10), send, receive, stall_s)


async def test_a_slow_download_is_not_closed() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(0.01)
        sent.append(message)

    # In the middle it is the engine that takes long.
    await streamed(Source(50, pause_s=0.6), send, stall_s=0.4)
    assert len(sent) == 52


async def test_what_a_stream_holds_is_released_also_when_its_source_cannot_be_closed() -> None:
    async def send(_message: Message) -> None: ...

    with pytest.raises(RuntimeError, match="it is stuck"):
        await streamed(Source(error=RuntimeError("it is stuck")), send)


async def test_a_failing_first_event_closes_the_stream() -> None:
    class Failing:
        is_closed = False

        def __aiter__(self) -> Self:
            return self

        async def __anext__(self) -> str:
            raise RuntimeError("no")

        async def aclose(self) -> None:
            self.is_closed = True

    stream = Failing()
    with pytest.raises(RuntimeError, match="no"):
        await with_first_event(stream)
    assert stream.is_closed


@pytest.mark.parametrize(("receive", "reads"), [(gone, True), (never, False)])
async def test_a_stream_that_has_not_begun_ends_with_its_client(receive: Receive, reads: bool) -> None:
    has_ended, sent = asyncio.Event(), list[Any]()

    async def late() -> StartedAnswer:
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message.get("body"))
        if sent[-1] is not None and not reads:
            raise BrokenPipeError

    scope: dict[str, Any] = {"type": "http", "method": "POST"}
    asked, beginning = begin_context(scope), asyncio.create_task(late())
    await asyncio.sleep(0)
    with pytest.raises(ClientDisconnect):
        await event_stream(beginning, asked, Settings())(scope, receive, send)
    assert has_ended.is_set()
    assert sent == [None, COMMENT.encode()]


def frame(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


STREAM = (
    frame("response.created")
    + frame("response.in_progress")
    + frame("response.output_text.delta", delta="a")
    + frame("response.output_text.delta", delta="b")
    + frame("response.completed", response={"id": "r"})
)


class Results:
    """Results of a call, of which each part has the next number."""

    call = SimpleNamespace(failure=None)
    context = SimpleNamespace(sent_model=None)
    settings = SimpleNamespace(sse_keep_alive_s=0.0)
    num_taken = 0

    async def new_results(self, _choice: int) -> int:
        self.num_taken += 1
        return self.num_taken

    async def remaining_results(self, _choice: int) -> str:
        return "rest"


@pytest.mark.parametrize("size", [1, 7, 20, 64, len(STREAM)])
async def test_events_are_whole_wherever_the_stream_is_cut(size: int) -> None:
    sent: list[Any] = []
    closed: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        kind = (b"content-type", b"text/event-stream")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        for begin in range(0, len(STREAM), size):
            end = begin + size
            body = STREAM[begin:end]
            await send({"type": "http.response.body", "body": body, "more_body": end < len(STREAM)})

    async def send(message: Any) -> None:
        sent.append(message)

    engine, results = cast("Any", SimpleNamespace(close_call=closed.append)), Results()
    await InterveningApp(app, engine, cast("Any", results))({"type": "http"}, never, send)
    text = b"".join(message["body"] for message in sent[1:]).decode()
    events = [json.loads(one.partition("\ndata: ")[2]) for one in text.split("\n\n") if one]
    assert [event["type"].rpartition(".")[2] for event in events] == [
        "created", "in_progress", "delta", "delta", "completed",
    ]  # fmt: skip
    assert [event.get("interventions") for event in events[:4]] == [None, None, 1, 2]
    assert events[4]["response"] == {"id": "r", "interventions": "rest"}
    assert not sent[-1]["more_body"]
    assert closed == [results.call]
