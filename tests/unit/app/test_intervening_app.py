"""Results in the answers of vLLM's own application: where they go, however an answer is cut up."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from api_schemas.errors import ApiError, ErrorCode
from app.engine.intervening_app import InterveningApp

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
