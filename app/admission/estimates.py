"""Estimates the tokens of a request from its unvalidated body, whose malformed parts count as nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.training import LabelledPrompts
from nnsight_engine.remote_backend.messages import TraceHead

_BYTES_PER_TOKEN: Final = 4
_MAX_COUNT: Final = 2**31
_INTEGER: Final = TypeAdapter(int)
"""Parses integers as the engine does, which accepts 7.0 and "7" for 7."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The tokens that a request states (prompt ids, maximum to generate), and those guessed from its text."""

    stated: int
    guessed: int


def of_body(body: Mapping[str, Any]) -> Estimate:
    """Estimate a completion or a chat; if it states no maximum length, one token per choice."""
    prompts = _prompts(body["prompt"]) if "prompt" in body else [_chat(body.get("messages"))]
    most = _number(body.get("max_completion_tokens")) or _number(body.get("max_tokens")) or 1
    return _together(prompts, most * num_choices(body))


def of_text(num_bytes: int, body: Mapping[str, Any]) -> Estimate:
    """Estimate a body of another form: its size as text, and the maximum to generate if it states one."""
    most = _number(body.get("max_output_tokens")) or _number(body.get("max_tokens"))
    return Estimate(most, min(num_bytes // _BYTES_PER_TOKEN + 1, _MAX_COUNT))


def num_choices(body: Mapping[str, Any]) -> int:
    """Return how many answers a completion asks for: ``n`` of each prompt."""
    return min(num_prompts(body) * max(1, _number(body.get("n"))), _MAX_COUNT)


def num_prompts(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    count = len(prompt) if isinstance(prompt, list) and not _is_ids(prompt) else int(prompt is not None)
    embeds = body.get("prompt_embeds")
    count += len(embeds) if isinstance(embeds, list) else int(embeds is not None)
    return max(1, count)


def check_choices(body: Mapping[str, Any], max_choices: int) -> None:
    """Raise ApiError if a request has too many choices, each of which is a request to the engine."""
    num_wanted = num_choices(body)
    if num_wanted > max_choices:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A request may ask for {max_choices} choices, `n` for each of its prompts, and this one asks "
            f"for {num_wanted}; send several.",
            "n",
        )


def of_trace(head: TraceHead) -> Estimate:
    """Estimate the prompts of a trace, and what each of them may generate."""
    prompts, generated = [], 0
    for invoke in head.invokes:
        prompts.append(_prompt(invoke.prompt))
        sampling = invoke.sampling
        generated += max(1, _number(sampling.get("max_tokens"))) * max(1, _number(sampling.get("n")))
    return _together(prompts, generated)


def of_training(training: LabelledPrompts) -> Estimate:
    """Estimate the prompts of a training, each of which generates one token."""
    prompts = [
        Estimate(0, _guessed(prompt))
        if isinstance(prompt, str)
        else _chat([message.model_dump() for message in prompt])
        for prompt in (*training.positive, *training.negative)
    ]
    return _together(prompts, len(prompts))


def _together(prompts: list[Estimate], generated: int) -> Estimate:
    stated = generated + sum(prompt.stated for prompt in prompts)
    return Estimate(min(stated, _MAX_COUNT), min(sum(prompt.guessed for prompt in prompts), _MAX_COUNT))


def _prompts(prompt: Any) -> list[Estimate]:
    if isinstance(prompt, list) and not _is_ids(prompt):
        return [_prompt(item) for item in prompt]
    return [_prompt(prompt)]


def _is_ids(prompt: list[Any]) -> bool:
    """Return whether a list is one prompt of token ids, rather than several prompts."""
    return not prompt or isinstance(prompt[0], int)


def _prompt(prompt: Any) -> Estimate:
    if isinstance(prompt, list):
        return Estimate(len(prompt), 0)
    return Estimate(0, _guessed(prompt))


def _chat(messages: Any) -> Estimate:
    """Estimate a conversation by the texts in its messages."""
    guessed = 0
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [{"text": content}]:
            guessed += _guessed(part.get("text")) if isinstance(part, dict) else 0
    return Estimate(0, guessed)


def _guessed(text: Any) -> int:
    return len(text) // _BYTES_PER_TOKEN + 1 if isinstance(text, str) else 0


def _number(value: Any) -> int:
    try:
        return min(max(0, _INTEGER.validate_python(value)), _MAX_COUNT)
    except ValidationError:
        return 0
