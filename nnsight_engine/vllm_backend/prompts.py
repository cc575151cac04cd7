"""What a user passes to a trace on vLLM, as vLLM's prompt and sampling parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_OTHER_NAMES = {"max_new_tokens": "max_tokens"}
"""Transformers' names of what vLLM calls otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One invoke's input.

    Attributes:
        prompt: As vLLM takes it: ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, perhaps more.
        sampling: Sampling parameters by name, over the trace's own.
        params: vLLM's sampling parameters as an object, which go before any given by name.
        edits: Names of the edits to run beside the block; None for those of the trace.
    """

    prompt: dict[str, Any]
    sampling: Mapping[str, Any]
    params: Any = None
    edits: Any = None

    def named(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters given by name, over the trace's own."""
        given = {**shared, **self.sampling}
        return {_OTHER_NAMES.get(name, name): value for name, value in given.items()}


def as_prompt(given: Any) -> dict[str, Any]:
    """Return a prompt as vLLM takes it.

    Args:
        given: Text; token ids as a list, a tensor ``[tokens]`` or ``[1, tokens]``, or a tokenizer's output; a
            prompt of vLLM's; or a list that holds one of these.

    Raises:
        ValueError: There are several, or none.
        TypeError: It is something else.
    """
    if isinstance(given, str):
        return {"prompt": given}
    if isinstance(given, Mapping):
        return as_prompt(given["input_ids"]) if "input_ids" in given else dict(given)
    if isinstance(given, torch.Tensor):
        return as_prompt(given.tolist())
    if isinstance(given, Sequence) and not isinstance(given, bytes):
        if given and all(isinstance(token, int) for token in given):
            return {"prompt_token_ids": list(given)}
        if len(given) == 1:
            return as_prompt(given[0])
        raise ValueError(
            f"an invoke is one request with one prompt, got {len(given)}; write one invoke for each: "
            "`for prompt in prompts: with tracer.invoke(prompt): ...`"
        )
    raise TypeError(f"a prompt is text, token ids or one of vLLM's prompts, got {type(given).__name__}")


def refuse_function(options: Mapping[str, Any]) -> None:
    """Refuse to trace anything but generation.

    Raises:
        TypeError: A function is given.
    """
    if options.get("fn") is not None:
        raise TypeError("fn= is not supported on vLLM: a trace there is a request, and the engine runs it")
