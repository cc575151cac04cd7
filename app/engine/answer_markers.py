"""The tokens that mark reasoning and tool calls in a model's answers, by the parsers that the server uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.v1.engine.async_llm import AsyncLLM

from nnsight_engine.plans.answer_parts import NO_MARKERS, AnswerMarkers, Part

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
    """Return the markers that vLLM's parsers of these names read; empty names for none."""
    vocabulary = tokenizer.get_vocab()
    parser = ReasoningParserManager.get_reasoning_parser(reasoning)(tokenizer) if reasoning else None
    used: list[tuple[Part, str, PartMarkers | None]] = []
    if parser is not None:
        used.append((Part.REASONING, f"--reasoning-parser {reasoning}", _of_reasoning(parser)))
    if tools:
        used.append((Part.TOOL_CALLS, f"--tool-call-parser {tools}", TOOL_MARKERS.get(tools)))
    missing, begun_by = dict(NO_MARKERS.missing), dict[int, int]()
    for part, option, markers in used:
        reason = _reason(option, markers, vocabulary)
        if markers is None or reason:
            missing |= {part.name.lower(): reason, "content": reason}
            continue
        del missing[part.name.lower()]
        begun_by |= {vocabulary[text]: int(part) for text in markers.begins}
        begun_by |= {vocabulary[markers.end]: int(Part.CONTENT)} if markers.end else {}
    if used and not any(part.name.lower() in missing for part, _, _ in used):
        del missing["content"]
    begins_with_reasoning = parser is not None and "reasoning" not in missing and _is_reasoning("x", parser)
    first = Part.REASONING if begins_with_reasoning else Part.CONTENT
    # Special tokens stand between the turns: the end of text, or the names of those who speak.
    between = {
        token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special
    }
    return AnswerMarkers(begun_by, first, frozenset(between - begun_by.keys()), missing)


def _of_reasoning(parser: ReasoningParser) -> PartMarkers | None:
    begin, end = parser.reasoning_start_str, parser.reasoning_end_str
    return PartMarkers((begin.strip(),), end.strip()) if begin and end else None


def _reason(option: str, markers: PartMarkers | None, vocabulary: Mapping[str, int]) -> str:
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
