"""Streams: closed on every way out, and results put into their events wherever they are cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, Self

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from api_schemas.errors import ApiError, ErrorCode
from app.engine.intervening_app import InterveningApp
from app.request_context import begin_context
from app.services.streaming import ClosingStream, first_event


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
        await first_event(stream)
    assert stream.is_closed


JSON = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
EVENTS = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


class Results:
    """Numbers each part that is taken."""

    def __init__(self, keep_alive_s: float = 0.0) -> None:
        self.call = SimpleNamespace(failure=None, is_closed=False)
        self.asked = SimpleNamespace(sent_model=None)
        self.settings = SimpleNamespace(sse_keep_alive_s=keep_alive_s)
        self.num_taken = 0

    async def part(self, choice: int) -> dict[str, Any]:
        self.num_taken += 1
        return {"part": self.num_taken, "choice": choice}

    async def rest(self, choice: int) -> dict[str, Any]:
        return {"rest": True, "choice": choice}


def frame(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


STREAM = (
    frame("response.created")
    + frame("response.in_progress")
    + frame("response.output_text.delta", delta="a")
    + frame("response.output_text.delta", delta="b")
    + frame("response.completed", response={"id": "r"})
)


async def answered(
    results: Results, start: dict[str, Any], bodies: list[bytes], pause_s: float = 0, seen: Any = None
) -> Any:
    """Return the messages that are sent for an answer in pieces; ``seen`` gets their number before each."""
    seen = [] if seen is None else seen
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(start)
        for index, body in enumerate(bodies):
            await asyncio.sleep(pause_s)
            seen.append(len(sent))
            await send({"type": "http.response.body", "body": body, "more_body": index + 1 < len(bodies)})

    async def send(message: Any) -> None:
        sent.append(message)

    def close(call: Any) -> None:
        call.is_closed = True

    engine: Any = SimpleNamespace(close_call=close)
    given: Any = results
    try:
        await InterveningApp(app, engine, given)({"type": "http"}, send, send)  # type: ignore[arg-type]  # it reads nothing
    finally:
        assert results.call.is_closed
    return sent


def events_of(sent: list[Any]) -> list[Any]:
    text = b"".join(message["body"] for message in sent[1:]).decode()
    return [json.loads(one.partition("\ndata: ")[2]) for one in text.split("\n\n") if one]


@pytest.mark.parametrize("size", [1, 7, 20, 64, len(STREAM)])
async def test_events_are_whole_wherever_the_stream_is_cut(size: int) -> None:
    pieces = [STREAM[begin : begin + size] for begin in range(0, len(STREAM), size)]
    sent = await answered(Results(), EVENTS, pieces)
    assert sent[0] is EVENTS
    events = events_of(sent)
    assert [event["type"].rpartition(".")[2] for event in events] == [
        "created", "in_progress", "delta", "delta", "completed",
    ]  # fmt: skip
    assert [event.get("interventions", {}).get("part") for event in events[:4]] == [None, None, 1, 2]
    assert events[4]["response"] == {"id": "r", "interventions": {"rest": True, "choice": 0}}
    assert not sent[-1]["more_body"]


async def test_items_have_results_of_their_own_and_the_length_is_right() -> None:
    body = json.dumps({"data": [{"index": 0}, {"index": 1}]}).encode()
    head, message = await answered(Results(), JSON, [body[:9], body[9:]])
    assert [item["interventions"]["choice"] for item in json.loads(message["body"])["data"]] == [0, 1]
    assert dict(head["headers"])[b"content-length"] == str(len(message["body"])).encode()


@pytest.mark.parametrize(
    ("start", "body"),
    [
        ({**JSON, "status": 500}, b"{}"),
        (EVENTS, frame("response.created") + frame("error", message="x")),
    ],
)
async def test_a_failed_call_is_raised_instead_of_the_applications_error(start: Any, body: bytes) -> None:
    results = Results()
    results.call.failure = ApiError(ErrorCode.CAPTURE_TOO_LARGE, "too large")
    with pytest.raises(ApiError, match="too large"):
        await answered(results, start, [body, b""])


@pytest.mark.parametrize(("keep_alive_s", "num_sent"), [(0.01, [1, 2]), (0.0, [0, 0])])
async def test_a_stream_that_waits_begins_when_comments_are_due(
    keep_alive_s: float, num_sent: list[int]
) -> None:
    seen: list[int] = []
    place = STREAM.index(b"event: response.output")
    pieces = [STREAM[:place], STREAM[place:]]
    sent = await answered(Results(keep_alive_s), EVENTS, pieces, pause_s=0.1, seen=seen)
    assert seen == num_sent
    assert len(events_of(sent)) == 5
