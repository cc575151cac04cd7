"""What vLLM refuses of bodies and of sampling parameters, in our words."""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import vllm
from starlette.responses import JSONResponse
from vllm import SamplingParams
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.pooling.pooling.protocol import PoolingCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from api_schemas.errors import ApiError
from app.engine.vllm_app import VLLMApp
from app.engine.vllm_errors import (
    ADVICE,
    TOO_LARGE,
    Refusals,
    RefusedError,
    cause_of,
    corrected,
    raise_stream_errors,
    trace_refusal,
)
from app.engine.vllm_requests import read_request, refusing
from app.engine.vllm_traces import sampling_params
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY
from tests.e2e.odd_requests import BODIES, CHAT, COMPLETIONS, ODD
from tests.unit.app.vllm_option_tables import HANDLED_HERE, TO_ENGINE


async def test_any_odd_value_of_any_field_is_refused_by_its_name() -> None:
    """What stands beside it is right, so nothing but the field can be meant."""
    faults = []
    for path, model in ((COMPLETIONS, CompletionRequest), (CHAT, ChatCompletionRequest)):
        for name, value in itertools.product(model.model_fields, ODD):
            body = {**copy.deepcopy(BODIES[path][0]), name: copy.deepcopy(value)}
            try:
                with Refusals(body, model.model_fields):
                    await sampled(model, body)
            except ApiError as error:
                # Chat has two fields for it; what is wrong is that they do not go together.
                is_meant = name in {(error.param or "").partition(".")[0], "logprobs"}
                is_worded = "; " in error.message and error.message.endswith((".", "/docs"))
                if not (is_meant and error.status == 400 and is_worded):
                    faults.append((path, name, value, error.param, error.message))
    assert not faults


async def sampled(model: type[Any], body: dict[str, Any]) -> None:
    """Read a body as vLLM does until it knows the sampling parameters."""
    request = await read_request(model, body)
    try:
        request.to_sampling_params(10, {})
    except Exception as error:
        raise RefusedError.of(error) from error


async def test_what_no_field_explains_is_a_400_too() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "function"}]
    choice = {"type": "function", "function": {"name": "g"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice}
    with pytest.raises(ApiError) as caught:
        await read_request(ChatCompletionRequest, body)
    assert caught.value.status == 400


COMPLETION: Final = [*CompletionRequest.model_fields]
CHATS: Final = [*ChatCompletionRequest.model_fields]


@pytest.mark.parametrize(
    ("error", "body", "fields", "code", "param", "step"),
    [
        (RefusedError("The model `x` does not exist.", "model", 404), {"model": "x"}, COMPLETION,
         "model_not_found", "model", "GET /v1/models"),
        (RefusedError("This model's maximum context length is 8 tokens (parameter=input_tokens, value=9)",
                      "input_tokens"), {"messages": []}, CHATS, "invalid_value", "messages", ""),
        (RefusedError("Requested sample logprobs of 99, which is greater than max allowed: 20", "logprobs"),
         {"logprobs": True, "top_logprobs": 99}, CHATS, "invalid_value", "top_logprobs", "change `top_"),
        (RefusedError("max_tokens must be at least 1, got 0.", "max_tokens"), {"max_completion_tokens": 0},
         CHATS,
         "invalid_value", "max_completion_tokens", "change `max_c"),
        (RefusedError("n must be 1 when using greedy sampling, got 2."), {"n": 2}, COMPLETION,
         "unsupported_combination", "n", "set `temperature` above 0"),
        (RefusedError("extra_args integers must be", "extra_args"), {"prompt": "a", "vllm_xargs": {}},
         COMPLETION,
         "invalid_value", "vllm_xargs", "change `vllm_xargs`"),
        (RefusedError("too large an image", "image_url"), {"messages": []}, CHATS,
         "invalid_value", "messages", "send another `messages`"),
        (RefusedError(f"{TOO_LARGE} (can't serialize ints)"), {"n": 2, "stream_interval": 10**30}, COMPLETION,
         "invalid_value", "stream_interval", "got an integer of 100 bits; change `stream_interval`"),
        (RefusedError("Chat template is passed with request"), {"chat_template": "{{"}, CHATS,
         "invalid_value", "chat_template", "got '{{'; omit it"),
        (RefusedError("The engine is busy.", None, 503), {}, CHATS, "queue_full", None, "again later"),
        (RefusedError("a secret of a defect", None, 500), {}, CHATS, "internal_error", None, "sent again"),
        (RefusedError("Not there.", None, 501), {}, CHATS, "invalid_value", None, "compare"),
    ],
)  # fmt: skip
def test_a_refusal_is_worded_for_its_body(
    error: RefusedError, body: dict[str, Any], fields: list[str], code: str, param: str | None, step: str
) -> None:
    made = Refusals(body, fields).refused(error)
    assert (made.code, made.param) == (code, param)
    assert step in made.message
    assert "secret" not in made.message
    assert "parameter=" not in made.message


async def test_what_vllm_would_trip_over_later_is_refused() -> None:
    with pytest.raises(ApiError, match="send it as the field `kv_transfer_params`"):
        await read_request(CompletionRequest, {"prompt": "a", "vllm_xargs": {"kv_transfer_params": "x"}})
    body = {"prompt": "a", "stream": True, "echo": True, "logprobs": 0, "n": 2}
    with pytest.raises(ApiError, match="leave one of the three out"):
        await read_request(CompletionRequest, body)
    for one in ({"stream": False}, {"echo": False}, {"logprobs": None}, {"n": 1}):
        await read_request(CompletionRequest, {**body, **one})


async def frames(*given: str) -> AsyncGenerator[str, None]:
    for one in given:
        yield one


async def failing(*given: str) -> AsyncGenerator[str, None]:
    for one in given:
        yield one
    raise RefusedError("temperature must be in [0, 2], got 3.0.", "temperature")


@pytest.mark.parametrize("given", [(), ("data: {}\n\n",)])
async def test_a_refusal_in_a_stream_is_worded_as_one_before_it(given: tuple[str, ...]) -> None:
    with pytest.raises(ApiError, match=r"got 3\.0; change `temperature`"):
        async for _ in refusing(failing(*given), Refusals({"temperature": 3.0}, COMPLETION)):
            pass


@pytest.mark.parametrize("given", [(), ("data: {}\n\n",), ("data: {}\n\n", "data: {}\n\n")])
async def test_any_other_stream_goes_on(given: tuple[str, ...]) -> None:
    assert [one async for one in refusing(frames(*given), Refusals({}, COMPLETION))] == list(given)


class Serving:
    """What streams of vLLM's serving classes word errors with."""

    def create_streaming_error_response(self, message: str | Exception) -> str:
        return json.dumps({"error": {"message": str(message), "code": 400}})


def test_streams_raise_errors_that_vllm_would_send_as_events() -> None:
    serving = Serving()
    raise_stream_errors(serving)
    with pytest.raises(RefusedError, match="no"):
        serving.create_streaming_error_response(VLLMValidationError("no", parameter="stop"))
    with pytest.raises(RefusedError, match="no"):
        serving.create_streaming_error_response("no")
    with pytest.raises(ApiError) as caught:
        serving.create_streaming_error_response(EngineDeadError())
    assert caught.value.code == "engine_dead"


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
    assert (cause_of(error) is not error) is is_clients


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_parameters_are_vllms() -> None:
    given = {"temperature": 1, "n": 2, "stop": "x", "logit_bias": {"5": 1}, "extra_args": {"mine": [1, "a"]}}
    params = sampling_params(given, "invokes.0")
    assert (params.temperature, params.n, params.stop, params.logit_bias) == (1.0, 2, ["x"], {5: 1.0})
    assert params.extra_args == {"mine": [1, "a"]}


def test_what_is_derived_from_others_is_made_anew() -> None:
    given = {"skip_clone": True, "_eos_token_id": 3, "output_text_buffer_length": 10**9}
    params = sampling_params({**given, "structured_outputs": {"regex": "a", "_backend": "x"}}, "invokes.0")
    assert (params.skip_clone, params.output_text_buffer_length) == (False, 0)
    assert params.structured_outputs._backend is None  # noqa: SLF001 - vLLM has no public name for it


def test_what_vllm_refuses_has_a_value_and_a_step() -> None:
    with pytest.raises(ApiError, match=r"got -1\.0; change `temperature`") as caught:
        sampling_params({"temperature": -1}, "invokes.3")
    assert "parameter=" not in caught.value.message
    error = VLLMValidationError("This model's maximum context length is 8 tokens.", parameter="input_tokens")
    told = trace_refusal(error, "invokes.1", {"temperature": 1})
    assert told is not None
    assert (told.code, told.param) == ("invalid_value", "invokes.1.prompt")
    assert trace_refusal(RuntimeError("a defect"), "invokes.1", {}) is None


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"n": 0}, "invalid_value", "n"),
        ({"stop": [1]}, "invalid_value", "stop[0]"),
        ({"seed": 2**70}, "invalid_value", ""),
        ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias"),
        ({"surprise": 1}, "invalid_value", "surprise"),
        ({"extra_args": {"deep": {"er": 1}}}, "invalid_value", ""),
        ({"extra_args": 3}, "invalid_value", ""),
        ({"extra_args": {TRACE_KEY: "x"}}, "bad_request", "extra_args"),
        ({"structured_outputs": {"json": nested(500)}}, "invalid_value", ""),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "unsupported_combination",
            "structured_outputs",
        ),
        ({"output_kind": 7}, "invalid_value", "output_kind"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], code: str, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        sampling_params(given, "invokes.3")
    assert (caught.value.code, caught.value.status) == (code, 400)
    assert str(caught.value.param).startswith(f"invokes.3.sampling.{field}" if field else "invokes.3")


SERVED: Final = (
    "entrypoints/anthropic", "entrypoints/generate/base", "entrypoints/openai", "entrypoints/pooling",
    "entrypoints/serve", "inputs", "lora", "multimodal", "parser", "pooling_params.py", "reasoning",
    "renderers", "sampling_params.py", "tokenizers", "tool_parsers", "v1/engine/input_processor.py",
    "v1/structured_output",
)  # fmt: skip
"""The parts of vLLM whose messages reach clients."""
FLAG: Final = re.compile(r"--([a-z][\w-]*)")
NAMED: Final = re.compile(
    r"\b(?:set|use|pass|send|provide|specify)\b(?: \w+){0,5}? (?:['`\"](\w+)['`\"]|(\w+)=)", re.IGNORECASE
)
"""The field that a message advises to send."""
VALUES: Final = {"auto", "xgrammar", "overflow_strategy"}
"""What messages name in the same way: values of fields, and a part of ``media_io_kwargs``."""


def rejected_names(text: str) -> set[str]:
    """Return the options and fields that a message advises, as far as this server refuses them."""
    models = [ChatCompletionRequest, CompletionRequest, ResponsesRequest, AnthropicMessagesRequest]
    models += [PoolingCompletionRequest, EmbeddingCompletionRequest]
    fields = {name for model in models for name in model.model_fields} | set(SamplingParams.__struct_fields__)
    flags = {name.replace("-", "_") for name in FLAG.findall(text)}
    named = {quoted or given for quoted, given in NAMED.findall(text)} - fields - VALUES
    return (flags | {one for one in named if not one.startswith("VLLM_")}) - TO_ENGINE - HANDLED_HERE


def literal(node: ast.expr) -> str:
    """Return the text that is written in an expression."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def messages() -> Iterator[str]:
    """Yield the texts of the errors that vLLM raises or answers in what is served of it."""
    root = Path(vllm.__file__).parent
    for path in itertools.chain(*(sorted((root / part).rglob("*.py")) or [root / part] for part in SERVED)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if isinstance(node, ast.Raise) or name == "create_error_response":
                texts = [literal(one) for one in (*call.args, *(given.value for given in call.keywords))]
                yield " ".join(filter(None, texts))


def test_no_message_advises_what_is_refused() -> None:
    found = set(messages())
    assert len(found) > 500
    assert not {text: names for text in found if (names := rejected_names(corrected(text)))}
    wrong = [text for text in found if rejected_names(text)]
    for advice in ADVICE:
        assert any(re.search(advice, text) for text in wrong), f"vLLM no longer advises {advice}"


@pytest.mark.parametrize("status", [200, 400])
async def test_errors_of_handlers_are_corrected(status: int) -> None:
    app = VLLMApp(argparse.Namespace())
    said = "LoRA ä is there. If you want to load the adapter in place, set 'load_inplace' to True."

    @app.get("/said")
    async def answer() -> JSONResponse:
        return JSONResponse({"error": {"message": said}}, status)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        found = await client.get("/said")
    assert found.status_code == status
    expected = said if status == 200 else "LoRA ä is there. Unload it first."
    assert found.json() == {"error": {"message": expected}}
