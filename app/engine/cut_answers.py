"""Answers that the limit on tokens has cut: whole and streamed they are the same.

vLLM ends a cut stream of ``/v1/responses`` as a complete one. A cut call of a tool is text in its whole
answers, with the marker; its streams hold back the marker and send the call as far as it came.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import pydantic_core
from openai.types.responses import ResponseIncompleteEvent
from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.tool_parsers.utils import partial_tag_overlap

from app.engine.answer_markers import TOOL_MARKERS

logger = logging.getLogger(__name__)

_LENGTH: Final = "length"
_Parsed = tuple[str | None, str | None, list[FunctionCall] | None]


class _Incomplete(ResponseIncompleteEvent):
    response: ResponsesResponse


def mend_chat(serving: Any, tools: str) -> None:
    """Have a serving class of chat completions parse cut answers as its streams do."""
    create = serving.chat_completion_full_generator

    async def whole(request: Any, outputs: AsyncIterator[Any], *args: Any, **more: Any) -> Any:
        last: list[Any] = []

        async def watched() -> AsyncIterator[Any]:
            async for one in outputs:
                last[:] = one.outputs
                yield one

        parser = more.get("parser")
        if parser is not None:
            parse = parser.parse
            texts = iter(last)  # vLLM parses them one after another

            def parsed(text: str, asked: Any, **options: Any) -> _Parsed:
                is_cut = next(texts).finish_reason == _LENGTH
                found: _Parsed = parse(text, asked, **options)
                return _as_streamed(found, parser, tools, text, asked) if is_cut else found

            parser.parse = parsed
        answer = await create(request, watched(), *args, **more)
        cut = {one.index for one in last if one.finish_reason == _LENGTH}
        for choice in getattr(answer, "choices", ()):
            if choice.index in cut:
                choice.finish_reason = _LENGTH
        return answer

    serving.chat_completion_full_generator = whole


def mend_messages(serving: Any, tools: str) -> None:
    """Do so for Anthropic's messages; a cut call's arguments, an object, have the part that is JSON."""
    mend_chat(serving, tools)
    convert = serving.messages_full_converter

    def converted(answer: Any) -> Any:
        for choice in answer.choices:
            for call in choice.message.tool_calls:
                call.function.arguments = _completed(call.function.arguments)
        return convert(answer)

    serving.messages_full_converter = converted


def mend_responses(serving: Any, tools: str) -> None:
    """Do the same for OpenAI's responses, and end their cut streams with ``response.incomplete``."""
    make, stream = serving._make_response_output_items, serving.responses_stream_generator  # noqa: SLF001 - no other

    def items(request: Any, output: Any, tokenizer: Any, parser: Parser | None = None) -> Any:
        if parser is not None and output.finish_reason == _LENGTH:
            parse = parser.parse

            def parsed(text: str, asked: Any, **options: Any) -> _Parsed:
                return _as_streamed(parse(text, asked, **options), parser, tools, text, asked)

            parser.parse = parsed  # a parser is one answer's
        return make(request, output, tokenizer, parser=parser)

    async def events(*args: Any, **more: Any) -> AsyncIterator[Any]:
        async for event in stream(*args, **more):
            if event.type == "response.completed" and event.response.status == "incomplete":
                number, response = event.sequence_number, event.response
                yield _Incomplete(type="response.incomplete", sequence_number=number, response=response)
            else:
                yield event

    serving._make_response_output_items = items  # noqa: SLF001 - no other
    serving.responses_stream_generator = events


def _as_streamed(found: _Parsed, parser: Parser, tools: str, text: str, request: Any) -> _Parsed:
    """Return the content of vLLM's stream of a cut answer, given its parser's results for the whole."""
    reasoning, content, calls = found
    reader, markers = parser.tool_parser, TOOL_MARKERS.get(tools)
    if not request.tools or request.tool_choice == "none":
        return found
    if not isinstance(parser, DelegatingParser) or type(parser).parse is not DelegatingParser.parse:
        return found
    if reader is None or reader.engine_based_streaming:  # those do so in whole answers, too
        return found
    begins = markers.begins if markers else ()
    if calls:
        return reasoning, (content or "")[: _start(content or "", begins)] or None, calls
    _, rest = parser.extract_reasoning(text, request)
    is_list = request.tool_choice == "required" and reader.supports_required_and_named
    start = 0 if is_list else _start(rest or "", begins)
    if start is None or not rest:
        return found
    return reasoning, rest[:start] or None, _started_calls(parser, rest, request) or None


def _started_calls(parser: DelegatingParser, text: str, request: Any) -> list[FunctionCall]:
    streaming = type(parser)(parser.model_tokenizer, request.tools)  # it has the state of one stream
    ids = parser.model_tokenizer.encode(text, add_special_tokens=False)
    try:
        delta, _ = streaming._extract_tool_calls_streaming(  # noqa: SLF001 - the choice of a tool is read nowhere else
            "", text, text, [], ids, ids, request
        )
    except Exception as error:  # noqa: BLE001 - of any parser, that of a plugin, too
        logger.warning("a parser of tool calls has failed on a cut one: %s", type(error).__name__)
        return []
    started: dict[int, FunctionCall] = {}
    for one in () if delta is None else delta.tool_calls:
        call = started.setdefault(one.index, FunctionCall(id=one.id, name="", arguments=""))
        call.name += (one.function and one.function.name) or ""
        call.arguments += (one.function and one.function.arguments) or ""
    return [call for call in started.values() if call.name]


def _start(text: str, markers: Sequence[str]) -> int | None:
    starts = [text.find(marker) for marker in markers if marker in text]
    parts: list[int] = [partial_tag_overlap(text, marker) for marker in markers]
    if not starts and any(parts):
        return len(text) - max(parts)
    return min(starts, default=None)


def _completed(arguments: str) -> str:
    try:
        found = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        found = {}
    return json.dumps(found if isinstance(found, dict) else {}, ensure_ascii=False)


__all__ = ["mend_chat", "mend_messages", "mend_responses"]
