"""The rounds of the HTTP benchmark: comparable with each other, and only whole answers count."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.http.load import LoadError, Round, run
from benchmarks.tracing.timing import Case, Measure, Row

EVENT = b'data: {"choices":[]}\n\n'
DONE = b"data: [DONE]\n\n"


def round_of(url: str = "", *, streams: bool = True, seed: int = 1) -> Round:
    return Round(url, "tiny", "", streams=streams, concurrency=2, num_requests=5, seed=seed)


def test_rounds_differ_in_prompts_alone() -> None:
    one, other = (list(round_of(seed=seed).bodies()) for seed in (1, 2))
    assert [body["max_tokens"] for body in one] == [body["max_tokens"] for body in other]
    assert all(first["prompt"] != second["prompt"] for first, second in zip(one, other, strict=True))
    assert one == list(round_of(seed=1).bodies())


async def complete(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.text())
    if not body["stream"]:
        return web.json_response({"usage": {"completion_tokens": body["max_tokens"]}})
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await response.write(EVENT)
    await response.write(DONE)
    return response


async def fall_short(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.text())
    if not body["stream"]:
        return web.json_response({"usage": {"completion_tokens": body["max_tokens"] - 1}})
    return web.Response(body=EVENT)


async def refuse(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="busy")


async def outcome(handler: Any, *, streams: bool) -> Any:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await run(session, round_of(str(server.make_url("")).rstrip("/"), streams=streams))


@pytest.mark.parametrize("streams", [False, True])
async def test_whole_answers_are_timed(streams: bool) -> None:
    timed = await outcome(complete, streams=streams)
    assert timed.request_s > 0
    assert timed.first_s > 0
    assert (timed.gap_s > 0) is streams


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("handler", [fall_short, refuse])
async def test_other_answers_end_the_round(handler: Any, streams: bool) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await outcome(handler, streams=streams)
    assert raised.group_contains(LoadError)


def test_a_floor_is_reached_from_above() -> None:
    def row(value: float) -> Row:
        measure = Measure("requests/s", lambda sample: sample["x"], 0.97, is_floor=True)
        return Row(Case("", "", lambda: dict, (measure,)), measure, (value, value, 1.5), {})

    assert row(0.98).reached
    assert not row(0.96).reached
    assert row(0.96).worst == 0.96
