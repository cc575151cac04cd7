"""The tokens that mark reasoning and tool calls in a model's answers, and answers that a limit has cut.

The markers are those of the parsers that the server uses. An answer that the limit on tokens has cut is the
same whole and streamed. In vLLM it is not: it ends a cut stream of ``/v1/responses`` as a complete one. A cut
call of a tool is text in its whole answers, with the marker; its streams hold back the marker and send the
call as far as it came.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pydantic_core
from openai.types.responses import ResponseIncompleteEvent
from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tool_parsers.utils import partial_tag_overlap
from vllm.v1.engine.async_llm import AsyncLLM

from nnsight_engine.plans.request_plan import NO_MARKERS, AnswerMarkers, Part

logger = logging.getLogger(__name__)


class PartMarkers(NamedTuple):
    """The markers of a part of answers; without ``end`` it reaches to the end of the answer."""

    begins: tuple[str, ...]
    end: str = ""


_TOOL_CALL: Final = PartMarkers(("<tool_call>",), "</tool_call>")
_DEEPSEEK: Final = PartMarkers(
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>"),
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
_KIMI: Final = PartMarkers(
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"), "<|tool_calls_section_end|>"
)
TOOL_MARKERS: Final[Mapping[str, PartMarkers]] = {
    **dict.fromkeys(
        (
            "ernie45", "glm45", "glm47", "granite4", "hermes", "ling3", "poolside_v1", "qwen3_json",
        ),
        _TOOL_CALL,
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "dots": PartMarkers(("<dots_function_call>",), "</dots_function_call>"),
    "functiongemma": PartMarkers(("<start_function_call>",), "<end_function_call>"),
    "gemma4": PartMarkers(("<|tool_call>",), "<tool_call|>"),
    "granite-20b-fc": PartMarkers(("<function_call>",)),
    "hy_v3": PartMarkers(("<tool_calls>", "<tool_call>"), "</tool_calls>"),
    "jamba": PartMarkers(("<tool_calls>",), "</tool_calls>"),
    "kimi_k2": _KIMI,
    "longcat": PartMarkers(("<longcat_tool_call>",), "</longcat_tool_call>"),
    "minimax_m2": PartMarkers(("<minimax:tool_call>",), "</minimax:tool_call>"),
    "mistral": PartMarkers(("[TOOL_CALLS]",)),
}  # fmt: skip
"""By vLLM's parser of tool calls. Others also find calls without a marker, so that tokens do not tell."""


def markers_of(engine: AsyncLLM, tools: str) -> AnswerMarkers:
    """Return the markers of a server's answers; ``tools`` is vLLM's parser of tool calls, empty if none."""
    reasoning = engine.vllm_config.structured_outputs_config.reasoning_parser
    try:
        return find_markers(reasoning, tools, engine.renderer.get_tokenizer())
    except Exception as error:
        logger.exception("the parts of answers cannot be told apart: a parser does not tell its markers")
        return AnswerMarkers(missing=dict.fromkeys(NO_MARKERS.missing, f"a parser has failed: {error}"))


def find_markers(reasoning: str, tools: str, tokenizer: Any) -> AnswerMarkers:
    """Return the markers that vLLM's parsers of these names read; empty names for none.

    Its ``missing`` has the reason for each part of answers that the tokens do not tell apart.
    """
    vocabulary = tokenizer.get_vocab()
    parser = ReasoningParserManager.get_reasoning_parser(reasoning)(tokenizer) if reasoning else None
    used: list[tuple[Part, str, PartMarkers | None]] = []
    if parser is not None:
        used.append((Part.REASONING, f"--reasoning-parser {reasoning}", _reasoning_markers(parser)))
    if tools:
        used.append((Part.TOOL_CALLS, f"--tool-call-parser {tools}", TOOL_MARKERS.get(tools)))
    missing, begun_by = dict(NO_MARKERS.missing), dict[int, int]()
    for part, option, markers in used:
        reason = _why_unmarked(option, markers, vocabulary)
        if markers is None or reason:
            missing |= {part.name.lower(): reason, "content": reason}
            continue
        del missing[part.name.lower()]
        begun_by |= {vocabulary[text]: int(part) for text in markers.begins}
        begun_by |= {vocabulary[markers.end]: int(Part.CONTENT)} if markers.end else {}
    if used and not any(part.name.lower() in missing for part, _, _ in used):
        del missing["content"]
    # Some templates open the reasoning in the prompt: their parsers take a text without markers for it.
    begins_with_reasoning = parser is not None and "reasoning" not in missing and _is_reasoning("x", parser)
    first_part = Part.REASONING if begins_with_reasoning else Part.CONTENT
    # Special tokens stand between the turns: the end of text, or the names of those who speak.
    between = {
        token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special
    }
    return AnswerMarkers(begun_by, first_part, frozenset(between - begun_by.keys()), missing)


def _reasoning_markers(parser: ReasoningParser) -> PartMarkers | None:
    begin, end = parser.reasoning_start_str, parser.reasoning_end_str
    return PartMarkers((begin.strip(),), end.strip()) if begin and end else None


def _why_unmarked(option: str, markers: PartMarkers | None, vocabulary: Mapping[str, int]) -> str:
    """Return why the tokens do not tell where a parser's part begins and ends; empty if they do."""
    if markers is None:
        return f"{option} finds this part by the text, not by tokens of its own"
    for text in (*markers.begins, markers.end):
        if text and text not in vocabulary:
            return f"{text}, by which {option} finds this part, is not one token of the model"
    return ""


def _is_reasoning(text: str, parser: ReasoningParser) -> bool:
    request = ChatCompletionRequest(messages=[{"role": "user", "content": text}])
    parts = parser.extract_reasoning(text, request)
    return parts is not None and bool(parts[0])  # Cohere's parsers return None


_LENGTH: Final = "length"
_Parsed = tuple[str | None, str | None, list[FunctionCall] | None]


class _Incomplete(ResponseIncompleteEvent):
    response: ResponsesResponse


def mend_chat(serving: Any, tools: str) -> None:
    """Have a serving class of chat completions parse answers that the token limit has cut as its streams do.

    They also keep the reason ``length``; ``tools`` is the name of vLLM's parser of tool calls.
    """
    create = serving.chat_completion_full_generator

    async def full_generator(request: Any, outputs: AsyncIterator[Any], *args: Any, **more: Any) -> Any:
        last_outputs: list[Any] = []

        async def watched() -> AsyncIterator[Any]:
            async for output in outputs:
                last_outputs[:] = output.outputs
                yield output

        parser = more.get("parser")
        if parser is not None:
            texts = iter(last_outputs)  # vLLM parses them one after another
            _mend(parser, tools, lambda: next(texts).finish_reason == _LENGTH)
        answer = await create(request, watched(), *args, **more)
        cut = {output.index for output in last_outputs if output.finish_reason == _LENGTH}
        for choice in getattr(answer, "choices", ()):  # vLLM's reason may be that a tool is called
            if choice.index in cut:
                choice.finish_reason = _LENGTH
        return answer

    serving.chat_completion_full_generator = full_generator


def mend_messages(serving: Any, tools: str) -> None:
    """Mend a serving class of Anthropic's messages as ``mend_chat`` does.

    The arguments of a cut call, an object, have the part that is JSON.
    """
    mend_chat(serving, tools)
    convert = serving.messages_full_converter

    def converted(answer: Any) -> Any:
        for choice in answer.choices:
            for call in choice.message.tool_calls:
                call.function.arguments = _completed_json(call.function.arguments)
        return convert(answer)

    serving.messages_full_converter = converted


def mend_responses(serving: Any, tools: str) -> None:
    """Mend a serving class of OpenAI's responses; its cut streams end with ``response.incomplete``."""
    make, stream = serving._make_response_output_items, serving.responses_stream_generator  # noqa: SLF001 - no other

    def items(request: Any, output: Any, tokenizer: Any, parser: Parser | None = None) -> Any:
        if parser is not None and output.finish_reason == _LENGTH:
            _mend(parser, tools, lambda: True)  # a parser is one answer's
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


def _mend(parser: Any, tools: str, is_cut: Callable[[], bool]) -> None:
    """Replace a parser's ``parse``: for a text that ``is_cut`` it returns what vLLM's stream would send."""
    parse = parser.parse

    def parsed(text: str, request: Any, **options: Any) -> _Parsed:
        mends = is_cut()
        result: _Parsed = parse(text, request, **options)
        return _as_streamed(result, parser, tools, text, request) if mends else result

    parser.parse = parsed


def _as_streamed(whole_result: _Parsed, parser: Parser, tools: str, text: str, request: Any) -> _Parsed:
    """Return the content of vLLM's stream of a cut answer, given its parser's results for the whole."""
    reasoning, content, calls = whole_result
    reader, markers = parser.tool_parser, TOOL_MARKERS.get(tools)
    if not request.tools or request.tool_choice == "none":
        return whole_result
    if not isinstance(parser, DelegatingParser) or type(parser).parse is not DelegatingParser.parse:
        return whole_result
    if reader is None or reader.engine_based_streaming:  # those do so in whole answers, too
        return whole_result
    begins = markers.begins if markers else ()
    if calls:
        return reasoning, (content or "")[: _marker_start(content or "", begins)] or None, calls
    _, answer = parser.extract_reasoning(text, request)
    is_list = request.tool_choice == "required" and reader.supports_required_and_named
    marker_start = 0 if is_list else _marker_start(answer or "", begins)
    if marker_start is None or not answer:
        return whole_result
    return reasoning, answer[:marker_start] or None, _started_calls(parser, answer, request) or None


def _started_calls(parser: DelegatingParser, text: str, request: Any) -> list[FunctionCall]:
    """Return the tool calls that vLLM's stream of a cut text would have sent, as far as they came."""
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
    for call_delta in () if delta is None else delta.tool_calls:
        call = started.setdefault(call_delta.index, FunctionCall(id=call_delta.id, name="", arguments=""))
        call.name += (call_delta.function and call_delta.function.name) or ""
        call.arguments += (call_delta.function and call_delta.function.arguments) or ""
    return [call for call in started.values() if call.name]


def _marker_start(text: str, markers: Sequence[str]) -> int | None:
    """Return where the first marker begins, a part of one at the end counts too; None if there is none."""
    starts = [text.find(marker) for marker in markers if marker in text]
    overlaps: list[int] = [partial_tag_overlap(text, marker) for marker in markers]
    if not starts and any(overlaps):
        return len(text) - max(overlaps)
    return min(starts, default=None)


def _completed_json(arguments: str) -> str:
    """Return cut JSON as that of the object that has come so far; of no object an empty one."""
    try:
        parsed = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        parsed = {}
    return json.dumps(parsed if isinstance(parsed, dict) else {}, ensure_ascii=False)
