"""What vLLM refuses of a body, and when its streams begin with a refusal."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

from api_schemas.errors import ApiError
from app.engine.vllm_errors import reason_of
from app.engine.vllm_requests import RefusedError, begun, read_request


@pytest.fixture
def http() -> Request:
    app = FastAPI()
    app.state.args = argparse.Namespace(log_error_stack=False)
    return Request({"type": "http", "app": app, "headers": []})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": 3.5}, "body.prompt"),  # pydantic's
        ({"prompt": ""}, "prompt"),  # of a validator
        ({"prompt": "a", "structured_outputs": []}, "body.structured_outputs"),  # a validator trips over it
    ],
)
async def test_every_refusal_is_a_400_that_names_the_field(
    http: Request, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        await read_request(CompletionRequest, body, http)
    assert caught.value.reply.status == 400
    assert caught.value.reply.body is not None
    assert caught.value.reply.body["error"]["param"] == param


async def test_what_no_field_explains_is_a_400_too(http: Request) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "function"}]
    choice = {"type": "function", "function": {"name": "g"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice}
    with pytest.raises(RefusedError) as caught:
        await read_request(ChatCompletionRequest, body, http)
    assert caught.value.reply.status == 400


async def test_what_vllm_would_trip_over_later_is_refused(http: Request) -> None:
    with pytest.raises(ApiError, match="send it as the field `kv_transfer_params`"):
        await read_request(
            CompletionRequest, {"prompt": "a", "vllm_xargs": {"kv_transfer_params": "x"}}, http
        )
    body = {"prompt": "a", "stream": True, "echo": True, "logprobs": 0, "n": 2}
    with pytest.raises(ApiError, match="leave one of the three out"):
        await read_request(CompletionRequest, body, http)
    for one in ({"stream": False}, {"echo": False}, {"logprobs": None}, {"n": 1}):
        await read_request(CompletionRequest, {**body, **one}, http)


async def frames(*given: str) -> AsyncGenerator[str, None]:
    for one in given:
        yield one


async def test_a_stream_that_begins_with_an_error_is_none() -> None:
    error = {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}
    with pytest.raises(RefusedError) as caught:
        await begun(frames(f"data: {json.dumps(error)}\n\n", "data: [DONE]\n\n"))
    assert (caught.value.reply.status, caught.value.reply.body) == (400, error)


@pytest.mark.parametrize("given", [(), ("data: {}\n\n",), ("data: {}\n\n", 'data: {"error": 1}\n\n')])
async def test_any_other_stream_goes_on(given: tuple[str, ...]) -> None:
    assert [one async for one in await begun(frames(*given))] == list(given)


@pytest.mark.parametrize(
    ("cause", "is_clients"),
    [
        (OverflowError("too long"), True),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no"), True),
        (ZeroDivisionError("division"), True),
        (VLLMValidationError("no"), True),
        (RuntimeError("a defect"), False),
        (KeyError("a defect"), False),
    ],
)
def test_what_cannot_be_written_for_the_engine_is_the_clients_mistake(
    cause: Exception, is_clients: bool
) -> None:
    error = EngineGenerateError()
    error.__cause__ = cause
    assert (reason_of(error) is not error) is is_clients
