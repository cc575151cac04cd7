"""What vLLM's ``/load`` counts of the requests that do not use vLLM's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from starlette.datastructures import State

from api_schemas.errors import ApiError, ErrorCode
from app.engine.client import EngineReply
from app.engine.vllm_app import counted


async def _events() -> AsyncIterator[str]:
    yield "data: 1\n\n"
    yield "data: 2\n\n"


async def _answer(state: State, reply: EngineReply) -> EngineReply:
    assert state.server_load_metrics == state.enable_server_load_tracking
    return reply


def _state(*, tracks: bool = True) -> State:
    return State({"enable_server_load_tracking": tracks, "server_load_metrics": 0})


async def test_a_complete_answer_counts_while_it_is_made() -> None:
    state, reply = _state(), EngineReply(body={})
    assert await counted(_answer(state, reply), state) is reply
    assert state.server_load_metrics == 0


async def test_a_failure_counts_while_it_lasts() -> None:
    async def fail() -> EngineReply:
        raise ApiError(ErrorCode.QUEUE_FULL, "full")

    state = _state()
    with pytest.raises(ApiError):
        await counted(fail(), state)
    assert state.server_load_metrics == 0


@pytest.mark.parametrize("num_read", [0, 1, 2])
async def test_a_stream_counts_until_it_is_closed(num_read: int) -> None:
    state = _state()
    stream = (await counted(_answer(state, EngineReply(stream=_events())), state)).stream
    assert stream is not None
    for _ in range(num_read):
        await anext(stream)
    assert state.server_load_metrics == 1
    for _ in range(2):
        await stream.aclose()  # type: ignore[attr-defined] # it has one
        assert state.server_load_metrics == 0


async def test_a_stream_of_an_engine_that_has_died_counts_no_longer() -> None:
    state = _state()
    stream = (await counted(_answer(state, EngineReply(stream=_events())), state)).stream
    state.server_load_metrics = 0  # as vLLM sets it for the next engine
    await stream.aclose()  # type: ignore[union-attr] # it has one
    assert state.server_load_metrics == 0


async def test_nothing_is_counted_unless_the_operator_asks_for_it() -> None:
    state, reply = _state(tracks=False), EngineReply(stream=_events())
    assert await counted(_answer(state, reply), state) is reply
    assert state.server_load_metrics == 0
