"""Answers that the limit on tokens cuts: vLLM's serving classes, whole and streamed, without an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Final

import pydantic_core
import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import ParserManager
from vllm.sampling_params import SamplingParams

from app.engine.answer_parsers import mend_chat, mend_messages, mend_responses
from nnsight_engine import bundled_model_path

TOKENIZER: Final = AutoTokenizer.from_pretrained(bundled_model_path())
PAINT: Final = {"name": "paint", "parameters": {"type": "object"}}
TOOLS: Final = [{"type": "function", "function": PAINT}]
CALL: Final = '<tool_call>\n{"name": "paint", "arguments": {"color": "red", "n": [1, 2]}}\n</tool_call>'
TWO: Final = f"Sure, 1 < 2. {CALL}{CALL}"
LISTED: Final = '[{"name": "paint", "parameters": {"color": "red", "n": [1, 2]}}]'
LONGCAT: Final = TWO.replace("tool_call>", "longcat_tool_call>")
_CHAT: Final[dict[str, Any]] = {
    "system_fingerprint": None, "enable_force_include_usage": False, "enable_prompt_tokens_details": False,
    "_include_reasoning_tokens_details": False, "enable_per_request_metrics": False,
    "enable_auto_tools": True, "enable_log_outputs": False, "request_logger": None,
    "response_role": "assistant",
    "model_config": None, "use_harmony": False, "tool_server": None,
}  # fmt: skip


def serving(kind: type[Any], tools: str) -> Any:
    """Return one of vLLM's serving classes, with all that it has to have to make answers of outputs."""
    parser = ParserManager.get_parser(tools, None, enable_auto_tools=True, tokenizer=TOKENIZER)
    made = object.__new__(kind)
    made.__dict__.update(_CHAT, parser_cls=parser, parser=parser)
    return made


async def outputs(text: str, reason: str, *, streams: bool) -> AsyncIterator[RequestOutput]:
    """Yield an answer, whole or token by token."""
    ids = TOKENIZER.encode(text)
    pieces = [(text, ids)]
    if streams:
        ends = [len(TOKENIZER.decode(ids[:end])) for end in range(len(ids) + 1)]
        pieces = [(text[start:stop], [one]) for start, stop, one in zip(ends, ends[1:], ids, strict=False)]
    for index, (piece, of_piece) in enumerate(pieces):
        ended = reason if index == len(pieces) - 1 else None
        output = CompletionOutput(0, piece, of_piece, None, None, finish_reason=ended)
        yield RequestOutput("r", None, [1, 2], None, [output], finished=ended is not None)


async def chat(made: Any, text: str, reason: str, choice: str, *, streams: bool) -> Any:
    """Return what vLLM's class makes of an answer: a response, or the frames of a stream."""
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "a"}], tools=TOOLS, tool_choice=choice, stream=streams,
        stream_options={"include_usage": True} if streams else None,
    )  # fmt: skip
    found = outputs(text, reason, streams=streams)
    same: tuple[Any, ...] = (request, found, "r", "m", [], TOKENIZER, SimpleNamespace())
    if streams:
        return made.chat_completion_stream_generator(*same, chat_template_kwargs={})
    parser = made._make_parser(request, TOKENIZER, {})  # noqa: SLF001 - as vLLM does
    return await made.chat_completion_full_generator(*same, parser=parser)


async def said(made: Any, text: str, reason: str, choice: str, *, streams: bool) -> tuple[Any, ...]:
    """Return the content, the calls and the reason of a chat completion's end.

    A stream that ends with a call's name has ``{}`` for arguments if the name is a piece of its own.
    """
    answer = await chat(made, text, reason, choice, streams=streams)
    if not streams:
        (one,) = answer.choices
        calls = [(call.function.name, call.function.arguments or "{}") for call in one.message.tool_calls]
        return one.message.content or "", calls, one.finish_reason
    content, calls_by_index, ended = "", dict[int, list[str]](), None
    async for frame in answer:
        data = frame.removeprefix("data: ").strip()
        for one in json.loads(data)["choices"] if data != "[DONE]" else ():
            content += one["delta"].get("content") or ""
            ended = one["finish_reason"] or ended
            for call in one["delta"].get("tool_calls") or ():
                parts = calls_by_index.setdefault(call["index"], ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
    return content, [(one, given or "{}") for one, given in calls_by_index.values()], ended


async def blocks(made: Any, text: str, reason: str, choice: str, *, streams: bool) -> tuple[Any, ...]:
    """Return the blocks of a message and the reason of its end, as Anthropic's client collects them."""
    answer = await chat(made, text, reason, choice, streams=streams)
    if not streams:
        message = made.messages_full_converter(answer).model_dump()
        whole = [(one["type"], one["text"] or one["name"], one["input"]) for one in message["content"]]
        return [one for one in whole if one != ("text", None, None)], message["stop_reason"]
    found: list[list[Any]] = []
    ended = None
    async for frame in made.message_stream_converter(answer):
        event = json.loads(frame.partition("data: ")[2])
        assert event["type"] != "error", event
        if event["type"] == "content_block_start":
            block = event["content_block"]
            found.append([block["type"], block.get("name") or "", [] if "name" in block else None])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                found[-1][1] += delta["text"]
            else:
                found[-1][2].append(delta["partial_json"])
        elif event["type"] == "message_delta":
            ended = event["delta"]["stop_reason"]
    for one in found:
        if one[2] is not None:
            one[2] = pydantic_core.from_json("".join(one[2]) or "{}", allow_partial=True)
    return [tuple(one) for one in found], ended


async def items(made: Any, text: str, reason: str, choice: str, *, streams: bool) -> tuple[Any, ...]:
    """Return the items of a response, its status and reason, and the type of the last event."""
    request = ResponsesRequest(
        input="a", stream=streams, tools=[{"type": "function", **PAINT}], tool_choice=choice, store=False
    )
    context = SimpleContext(parser_cls=made.parser, tokenizer=TOKENIZER, request=request)

    async def contexts() -> AsyncIterator[SimpleContext]:
        async for one in outputs(text, reason, streams=streams):
            context.append_output(one)
            yield context

    given = (request, SamplingParams(), contexts(), context, "m", TOKENIZER, SimpleNamespace())
    if streams:
        *_, last = [event async for event in made.responses_stream_generator(*given)]
        response, kind = json.loads(last.model_dump_json(by_alias=True))["response"], last.type
    else:
        response = json.loads((await made.responses_full_generator(*given)).model_dump_json(by_alias=True))
        kind = f"response.{response['status']}"
    output = [
        (
            one["type"],
            one.get("name"),
            one.get("arguments", "") or "{}",
            [part["text"] for part in one.get("content") or ()],
        )
        for one in response["output"]
    ]
    return output, response["status"], response["incomplete_details"], kind


ROUTES: Final = {
    "chat": (OpenAIServingChat, mend_chat, said),
    "messages": (AnthropicServingMessages, mend_messages, blocks),
    "responses": (OpenAIServingResponses, mend_responses, items),
}


@pytest.mark.parametrize(
    ("tools", "choice", "text"),
    [
        ("hermes", "auto", TWO), ("hermes", "required", TWO), ("granite4", "auto", TWO),
        ("granite4", "required", LISTED), ("longcat", "auto", LONGCAT),
    ],
)  # fmt: skip
@pytest.mark.parametrize("route", ROUTES)
async def test_a_cut_answer_is_the_same_whole_and_streamed(
    route: str, tools: str, choice: str, text: str
) -> None:
    kind, mend, read = ROUTES[route]
    made = serving(kind, tools)
    mend(made, tools)
    for end in range(1, len(text) + 1, 2):
        whole = await read(made, text[:end], "length", choice, streams=False)
        assert whole == await read(made, text[:end], "length", choice, streams=True), text[:end]
        assert "<tool" not in str(whole)
        assert whole[-1] in {"max_tokens", "length", "response.incomplete"}
