"""Whatever a client sends, the answer is JSON and no 500: its mistakes are 4xx, whole and streamed alike."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio

from api_schemas.errors import ErrorCode
from tests.e2e.live import MODEL
from tests.e2e.odd_requests import CHAT, COMPLETIONS, NUMBERS, POINT, OddRequest, requests
from tests.e2e.server import Server
from tests.narrow_model import WIDTH

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.asyncio(loop_scope="module")]

SEED: Final = int(os.environ.get("ODD_SEED") or 1)
BUDGET_S: Final = float(os.environ.get("ODD_BUDGET_S") or 60)
NUM_AT_ONCE: Final = 8
SERVER_ERROR: Final = 500

STEER: Final = {"op": "steer", "at": POINT, "vector": NUMBERS}
OVERFLOW: Final = {"op": "steer", "at": POINT, "vector": [1e30] * WIDTH, "scale": 1e30}
HUGE: Final = {"op": "steer", "at": "layers.*.output", "vector": [3e38] * WIDTH}
SAID: Final = [{"role": "user", "content": "Hi"}]
TOOLS: Final = [{"type": "function", "function": {"name": "f"}}]

ODD: Final[dict[tuple[str, str], list[Any]]] = {
    (COMPLETIONS, "cache_salt"): ["", 1, [], "\ud800"],
    (COMPLETIONS, "prompt"): ["", [""], [], [[]], [-1], [10**9], "\ud800", None, {}],
    (COMPLETIONS, "structured_outputs"): [
        {}, [], "x", {"structural_tag": "{}"}, {"regex": "("}, {"grammar": 'root ::= "a"\nroot ::= "b"'},
    ],
    (COMPLETIONS, "repetition_detection"): [[], {"max_pattern_size": -1}, {"max_pattern_size": 10**30}],
    (COMPLETIONS, "vllm_xargs"): [{"kv_transfer_params": "x"}, {"x": "\ud800"}, {"x": 10**30}],
    **{(COMPLETIONS, name): ["\ud800"] for name in ("stop", "model", "request_id", "user", "suffix")},
    (COMPLETIONS, "bad_words"): [["\ud800"]],
    (COMPLETIONS, "logprobs"): [-5],
    (COMPLETIONS, "stream_interval"): [10**30],
    (COMPLETIONS, "interventions"): [
        [OVERFLOW],
        [{"op": "logit_lens", "layers": 5}],
        [{"op": "capture", "at": POINT, "where": {"range": [0]}}],
        [{"op": "capture", "at": POINT, "wher": {}}],
    ],
    (CHAT, "top_logprobs"): [2],
    (CHAT, "tools"): [[]],
    (CHAT, "tool_choice"): ["auto", "required", {"type": "function", "function": {"name": "f"}}],
    (CHAT, "response_format"): [
        {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}, {"type": "x"},
    ],
    (CHAT, "messages"): [None, [], [{}], [{"role": "user", "content": "\ud800"}]],
    (CHAT, "interventions"): [[OVERFLOW]],
}  # fmt: skip
MISTAKES: Final = [(path, name, value) for (path, name), values in ODD.items() for value in values]
"""What is refused, the same whole and streamed, with and without interventions."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(narrow_server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=narrow_server.base_url, timeout=120) as client:
        yield client


async def send(http: httpx.AsyncClient, request: OddRequest) -> httpx.Response:
    kind = {} if request.body is None else {"content-type": "application/json"}
    headers = {**kind, **request.headers}
    return await http.request(request.method, request.url, content=request.content, headers=headers)


def strictly(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def parts_of(answer: httpx.Response) -> list[Any]:
    """Return an answer's JSON, or that of all its events; raises ValueError where it is none."""
    kind = answer.headers.get("content-type", "")
    text = answer.content.decode("utf-8")
    if kind.startswith("text/event-stream"):
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [strictly(one) for one in data if one != "[DONE]"]
    return [strictly(text)] if kind.startswith("application/json") else []


def fault_in(answer: httpx.Response) -> str | None:
    """Return what is wrong with an answer, whatever was asked."""
    if answer.status_code >= SERVER_ERROR:
        return f"{answer.status_code} {answer.text[:500]}"
    try:
        parts = parts_of(answer)
    except ValueError as error:
        return f"no JSON: {error}: {answer.text[:500]}"
    errors = [part["error"] for part in parts if isinstance(part, dict) and "error" in part]
    late = [one for one in errors if answer.is_success]
    for one in errors:
        misshapen = [key for key in ("message", "type", "code") if not isinstance(one.get(key), str)]
        if misshapen or not isinstance(one.get("param"), str | None):
            return f"an error whose {misshapen or 'param'} has the wrong type: {one}"
    internal = [one for one in late if one["code"] == "internal_error"]
    if internal:
        return f"a stream ended with {internal[0]}"
    if not answer.is_success and parts and not (errors and errors[0].get("message")):
        return f"{answer.status_code} without a message: {answer.text[:500]}"
    return None


async def test_odd_values_are_never_the_server_s_fault(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    faults: list[str] = []
    source: Iterator[OddRequest] = requests(document, SEED)
    num_sent, until = 0, time.monotonic() + BUDGET_S

    async def sender() -> None:
        nonlocal num_sent
        for request in source:
            if time.monotonic() > until:
                return
            num_sent += 1
            try:
                fault = fault_in(await send(http, request))
            except httpx.HTTPError as error:
                fault = repr(error)
            if fault is not None:
                faults.append(f"{fault}\n  {request}")

    await asyncio.gather(*(sender() for _ in range(NUM_AT_ONCE)))
    assert not faults, f"ODD_SEED={SEED}, {len(faults)} of {num_sent}:\n" + "\n".join(faults[:20])
    assert (await http.get("/health/ready")).status_code == 200
    assert num_sent > 0


@pytest.mark.parametrize(("path", "name", "value"), MISTAKES, ids=ascii)
async def test_mistakes_are_refused_the_same_way_whole_and_streamed(
    http: httpx.AsyncClient, path: str, name: str, value: Any
) -> None:
    good: dict[str, Any] = {"prompt": "A bird sat"} if path == COMPLETIONS else {"messages": SAID}
    said = set()
    for stream, intervenes in itertools.product((False, True), (False, True)):
        body = {"model": MODEL, "max_tokens": 2, "temperature": 0, "stream": stream, **good}
        if intervenes:
            body["interventions"] = [STEER]
        body[name] = value
        answer = await send(http, OddRequest("POST", path, body))
        assert answer.status_code in {400, 422}, (stream, intervenes, answer.text[:300])
        assert fault_in(answer) is None
        error = answer.json()["error"]
        assert (error["param"] or "").partition(".")[0] == name, error
        assert error["code"] in {*ErrorCode}
        said.add((answer.status_code, error["message"]))
    assert len(said) == 1, said


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "odd", "param", "step"),
    [
        (COMPLETIONS, {"temperature": 3}, "temperature", "change `temperature`"),
        (COMPLETIONS, {"n": 2, "temperature": 0}, "n", "set `temperature` above 0"),
        (COMPLETIONS, {"logprobs": 10**6}, "logprobs", "change `logprobs`"),
        (COMPLETIONS, {"stop_token_ids": [10**6]}, "stop_token_ids", "change `stop_token_ids`"),
        (COMPLETIONS, {"logit_bias": {"1000000": 1}}, "logit_bias", "change `logit_bias`"),
        (COMPLETIONS, {"min_tokens": 9, "max_tokens": 2}, "min_tokens", "lower `min_tokens`"),
        (COMPLETIONS, {"model": "nobody's"}, "model", "GET /v1/models"),
        (COMPLETIONS, {"suffix": "x"}, "suffix", "omit `suffix`"),
        (COMPLETIONS, {"prompt": "a " * 9000}, "prompt", "length"),
        (CHAT, {"top_logprobs": 10**6, "logprobs": True}, "top_logprobs", "change `top_logprobs`"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "change `max_completion_tokens`"),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 9000}]}, "messages", "length"),
        (CHAT, {"chat_template": "{{"}, "chat_template", "omit it"),
        (
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "false",
        ),
    ],
    ids=ascii,
)
async def test_what_vllm_refuses_late_names_the_field_and_the_step(
    http: httpx.AsyncClient, path: str, odd: dict[str, Any], param: str, step: str, stream: bool
) -> None:
    good: dict[str, Any] = {"prompt": "A bird sat"} if path == COMPLETIONS else {"messages": SAID}
    answer = await send(http, OddRequest("POST", path, {"max_tokens": 2, "stream": stream, **good, **odd}))
    assert answer.status_code in {400, 404}, answer.text[:300]
    assert fault_in(answer) is None
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert step in error["message"], error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "operation", [None, STEER, {"op": "trace", "code": "pass"}], ids=["plain", "steer", "trace"]
)
async def test_a_grammar_that_no_allowed_token_fits_is_the_clients_mistake(
    http: httpx.AsyncClient, stream: bool, operation: dict[str, Any] | None
) -> None:
    given = {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [1]}
    body = {"model": MODEL, "prompt": ["A bird", "sat"], "max_tokens": 2, "stream": stream, **given}
    if operation is not None:
        body["interventions"] = [operation]
    answer = await send(http, OddRequest("POST", COMPLETIONS, body))
    assert answer.status_code == 400, answer.text
    assert "No token is left that fits the grammar" in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_overflows_in_the_model_is_null(http: httpx.AsyncClient, path: str, stream: bool) -> None:
    given: dict[str, Any] = {"prompt": "A bird", "logprobs": 2, "echo": True}
    if path == CHAT:
        given = {"messages": SAID, "logprobs": True, "top_logprobs": 2}
    given |= {"max_tokens": 3, "stream": stream, "interventions": [HUGE]}
    for temperature in (0, 1):
        answer = await send(http, OddRequest("POST", path, {**given, "temperature": temperature}))
        assert answer.status_code == 200, answer.text
        assert fault_in(answer) is None
        assert "null" in answer.text
    assert (await http.get("/health/ready")).status_code == 200


async def test_a_stream_of_several_choices_with_echo_and_logprobs_is_refused(http: httpx.AsyncClient) -> None:
    body = {"prompt": "A bird", "max_tokens": 2, "temperature": 1, "n": 2, "echo": True, "logprobs": 1}
    assert (await send(http, OddRequest("POST", COMPLETIONS, body))).status_code == 200
    refused = await send(http, OddRequest("POST", COMPLETIONS, {**body, "stream": True}))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_combination")
    for one in ({"n": 1, "temperature": 0}, {"echo": False}, {"logprobs": None}):
        assert (
            await send(http, OddRequest("POST", COMPLETIONS, {**body, "stream": True, **one}))
        ).status_code == 200


async def test_tokens_of_conversations_and_ids_are_those_of_completions(http: httpx.AsyncClient) -> None:
    async def tokens(**body: Any) -> list[dict[str, Any]]:
        answer = await send(http, OddRequest("POST", "/v1/tokenize", body))
        return list(answer.json()["tokens"])

    text = await tokens(prompt="A bird sat")
    assert await tokens(prompt=[one["id"] for one in text]) == text
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello the"}]
    for more in (
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": TOOLS, "documents": [{"title": "a", "text": "b"}], "chat_template_kwargs": {"x": 1}},
    ):
        rendered = await tokens(messages=said, **more)
        body = {"messages": said, "max_tokens": 1, "tool_choice": "none", **more}
        usage = (await send(http, OddRequest("POST", CHAT, body))).json()["usage"]
        assert usage["prompt_tokens"] == len(rendered), more
    for ids, code in (
        ([10**6], "unknown_token"),
        ([-1], "invalid_shape"),
        ([1] * 2000, "invalid_value"),
        ([], "invalid_shape"),
    ):
        refused = await send(http, OddRequest("POST", "/v1/tokenize", {"prompt": ids}))
        assert refused.json()["error"]["code"] == code, refused.text
