"""How many tokens a request is about to use, from what it says before anybody has read it closely.

Bodies are hostile here: whatever is not what it should be counts nothing, and the engine refuses it later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from nnsight_engine.remote_backend.messages import TraceHead

_BYTES_A_TOKEN: Final = 4
_MOST: Final = 2**31


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens that a request asks for.

    Attributes:
        stated: Those that it states: ids of its prompts, and the most that may be generated.
        guessed: Those that its text may have.
    """

    stated: int
    guessed: int


def of_body(body: Mapping[str, Any]) -> Estimate:
    """Return what a completion or a chat asks for; what it leaves open to be generated counts nothing."""
    prompts = _prompts(body["prompt"]) if "prompt" in body else [_chat(body.get("messages"))]
    most = _number(body.get("max_completion_tokens")) or _number(body.get("max_tokens"))
    return _together(prompts, most * max(1, _number(body.get("n"))) * len(prompts))


def of_trace(head: TraceHead) -> Estimate:
    """Return what a trace's requests ask for."""
    prompts, generated = [], 0
    for invoke in head.invokes:
        prompts.append(_prompt(invoke.prompt))
        asked = invoke.sampling
        generated += _number(asked.get("max_tokens")) * max(1, _number(asked.get("n")))
    return _together(prompts, generated)


def _together(prompts: list[Estimate], generated: int) -> Estimate:
    stated = generated + sum(prompt.stated for prompt in prompts)
    return Estimate(min(stated, _MOST), min(sum(prompt.guessed for prompt in prompts), _MOST))


def _prompts(given: Any) -> list[Estimate]:
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return [_prompt(one) for one in given]
    return [_prompt(given)]


def _prompt(given: Any) -> Estimate:
    if isinstance(given, list):
        return Estimate(len(given), 0)
    return Estimate(0, _guessed(given))


def _chat(messages: Any) -> Estimate:
    guessed = 0
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [{"text": content}]:
            guessed += _guessed(part.get("text")) if isinstance(part, dict) else 0
    return Estimate(0, guessed)


def _guessed(text: Any) -> int:
    return len(text) // _BYTES_A_TOKEN + 1 if isinstance(text, str) else 0


def _number(given: Any) -> int:
    return min(given, _MOST) if isinstance(given, int) and given > 0 else 0


__all__ = ["Estimate", "of_body", "of_trace"]
