"""Comments in streams in which nothing happens, ``--sse-keep-alive-interval``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api_schemas.errors import ApiError, ErrorCode
from app.services.keep_alive import COMMENT
from tests.fakes.engine import FakeBehaviour
from tests.integration.conftest import Serve, Server
from tests.integration.test_training import PULLS, TRAIN
from tests.waiting import wait_for_async

INTERVAL_S = 0.05
PAUSE_S = 0.3
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two three"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two three"}]},
}


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve(FakeBehaviour(delay_s=PAUSE_S), sse_keep_alive_s=INTERVAL_S) as found:
        yield found


def frames(text: str) -> list[str]:
    found = text.split("\n\n")
    assert found.pop() == ""
    return [f"{one}\n\n" for one in found]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_has_comments_before_its_first_event_and_between_events(
    server: Server, path: str
) -> None:
    body = {**BODIES[path], "max_tokens": 2, "interventions": [{"op": "capture", "at": "layers.1.output"}]}
    answer = await server.client.post(path, json={**body, "stream": True})
    found = frames(answer.text)
    events = [one for one in found if one != COMMENT]
    assert found[0] == COMMENT
    assert COMMENT in found[found.index(events[0]) : found.index(events[-1])]
    server.engine.behaviour.delay_s = 0
    at_once = await server.client.post(path, json={**body, "stream": True})
    assert frames(at_once.text) == events
    assert [json.loads(one.removeprefix("data: "))["choices"] for one in events[:-1]]


async def test_an_answer_that_is_no_stream_has_none(server: Server) -> None:
    answer = await server.complete(max_tokens=2)
    assert answer.json()["choices"]


async def test_an_error_after_a_comment_is_an_event(server: Server) -> None:
    server.engine.behaviour.delay_s = 0
    server.engine.behaviour.error = ApiError(ErrorCode.QUEUE_FULL, "full")
    refused = await server.complete(stream=True)
    assert refused.status_code == 429
    server.engine.behaviour.delay_s = PAUSE_S
    answer = await server.complete(stream=True)
    assert answer.status_code == 200
    found = [one for one in frames(answer.text) if one != COMMENT]
    assert json.loads(found[0].removeprefix("data: "))["error"]["code"] == "queue_full"
    assert found[1:] == ["data: [DONE]\n\n"]
    await server.until_idle()


async def test_a_client_that_leaves_before_the_first_event_ends_its_work(server: Server) -> None:
    server.engine.behaviour.delay_s = 60
    asking = asyncio.create_task(server.complete(stream=True))
    await wait_for_async(lambda: server.engine.num_running == 1)
    await asyncio.sleep(3 * INTERVAL_S)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await server.until_idle()
    assert server.engine.num_running == 0


async def test_streams_of_vllms_handlers_have_them_too(server: Server) -> None:
    body = {"model": "m", "max_tokens": 1, "stream": True, "idle": "idle"}
    answer = await server.client.post("/v1/messages", json=body)
    first, *between, last = frames(answer.text)
    assert (first, last) == ("data: {}\n\n", "data: [DONE]\n\n")
    assert set(between) == {COMMENT}


async def test_a_training_that_waits_has_them(server: Server) -> None:
    server.engine.behaviour = FakeBehaviour(delay_s=PAUSE_S, pulls=PULLS)
    answer = await server.client.post("/v1/vectors/train", json={**TRAIN, "stream": True})
    found = frames(answer.text)
    assert found[0] == COMMENT
    events = [one for one in found if one != COMMENT]
    assert json.loads(events[-2].removeprefix("data: "))["vector"]["name"] == "mood"
    refused = await server.client.post("/v1/vectors/train", json={**TRAIN, "layers": "9", "stream": True})
    assert refused.status_code == 400


async def test_by_default_there_are_none(serve: Serve) -> None:
    async with serve(FakeBehaviour(delay_s=0.1)) as server:
        answer = await server.complete(stream=True, max_tokens=2)
        assert ":" not in {line[:1] for line in answer.text.splitlines()}
