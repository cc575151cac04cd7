"""What a user passes to a trace on vLLM, as vLLM's prompt and sampling parameters.

An invoke takes what ``LanguageModel`` takes, as long as it is one prompt. Nothing that was given is dropped:
it counts, or it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch

from nnsight_engine.modeling.rows import read_ids

_OTHER_NAMES: Final = {"max_new_tokens": "max_tokens"}
"""Transformers' names of what vLLM calls otherwise."""

_IDS: Final = "input_ids"
_MASK: Final = "attention_mask"
INPUT_NAMES: Final = (_IDS, _MASK, "token_type_ids")
"""What a tokenizer returns for a text. Token types are for encoders."""

_NESTED: Final = (str, Mapping, list, tuple)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One invoke's input.

    Attributes:
        prompt: As vLLM takes it: ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``, perhaps more.
        sampling: Sampling parameters by name, over the trace's own.
        params: vLLM's sampling parameters as an object, under those given by name.
        edits: Names of the edits to run beside the block; None for those of the trace.
    """

    prompt: dict[str, Any]
    sampling: Mapping[str, Any]
    params: Any = None
    edits: Any = None

    def sampling_over(self, shared: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return an object with sampling parameters, None if there is none, and names that go over it.

        Args:
            shared: What the trace says for all invokes, ``sampling_params`` among them.

        Raises:
            TypeError: Something given would have no effect.
        """
        trace = _by_name(shared)
        params = trace.pop("sampling_params", None)
        own = _by_name(self.sampling)
        if self.params is not None:
            if trace:
                raise TypeError(
                    "an invoke's sampling_params= says all parameters, so those of the trace would have no "
                    f"effect: {', '.join(sorted(trace))}. Give the invoke's by name, or the trace none"
                )
            return self.params, own
        if params is None:
            trace.setdefault("max_tokens", 1)
        return params, {**trace, **own}


def as_prompt(*inputs: Any, **named: Any) -> dict[str, Any]:
    """Return a prompt as vLLM takes it.

    Args:
        *inputs: Text; token ids as a list, an array or a tensor, ``[tokens]`` or ``[1, tokens]``; what a
            tokenizer returns; a prompt of vLLM's; or a list that holds one of these.
        **named: What a tokenizer returns, by name.

    Raises:
        ValueError: There are several, or none.
        TypeError: It is something else.
    """
    if inputs and named:
        raise TypeError(f"an invoke takes one prompt, got one and {', '.join(named)}")
    if len(inputs) > 1:
        raise TypeError(f"an invoke takes one prompt, got {len(inputs)} positional arguments")
    given = inputs[0] if inputs else named
    while isinstance(given, list | tuple) and len(given) == 1 and isinstance(given[0], _NESTED):
        given = given[0]
    if isinstance(given, str):
        return {"prompt": str(given)}
    if isinstance(given, list | tuple) and any(isinstance(item, str | Mapping) for item in given):
        raise _several(len(given))
    if not isinstance(given, Mapping):
        return {"prompt_token_ids": _one_row(given)}
    if any(name in given for name in INPUT_NAMES):
        return _tokenized(given)
    prompt = dict(given)
    if "prompt_token_ids" in prompt:
        prompt["prompt_token_ids"] = _one_row(prompt["prompt_token_ids"])
    return prompt


def refuse_function(options: Mapping[str, Any]) -> None:
    """Refuse to trace anything but generation.

    Raises:
        TypeError: A function is given.
    """
    if options.get("fn") is not None:
        raise TypeError("fn= is not supported on vLLM: a trace there is a request, and the engine runs it")


def _by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters by vLLM's names."""
    private = [name for name in given if name.startswith("_")]
    if private:
        raise TypeError(f"{private[0]} is not for callers: vLLM works it out from other sampling parameters")
    for other, name in _OTHER_NAMES.items():
        if other in given and name in given:
            raise TypeError(f"{other} and {name} are the same parameter, got both; give one of them")
    return {_OTHER_NAMES.get(name, name): value for name, value in given.items()}


def _tokenized(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt that a tokenizer's output is; what only fills it up is left out."""
    others = sorted(set(given) - set(INPUT_NAMES))
    if others or given.get(_IDS) is None:
        found = f"got {', '.join(map(str, given))}"
        raise TypeError(
            f"tokens for vLLM are input_ids, perhaps with an attention_mask, {found}. Other prompts of "
            'vLLM\'s are {"prompt": text, …} and {"prompt_token_ids": ids, …}'
        )
    ids = _one_row(given[_IDS])
    if given.get(_MASK) is not None:
        ids = _unfilled(ids, given[_MASK])
    return {"prompt_token_ids": ids}


def _unfilled(ids: list[int], mask: Any) -> list[int]:
    """Return the tokens that a mask leaves: all but what one end was filled up with."""
    kept = torch.as_tensor(mask).ne(0).flatten().tolist()
    if len(kept) != len(ids):
        raise ValueError(f"attention_mask has {len(kept)} entries for {len(ids)} tokens")
    if True not in kept:
        raise ValueError("attention_mask leaves no token of the prompt")
    first, stop = kept.index(True), len(kept) - kept[::-1].index(True)
    if not all(kept[first:stop]):
        raise ValueError(
            "attention_mask hides tokens between others, which vLLM cannot; leave those tokens out of the "
            "prompt, or trace a LanguageModel"
        )
    return ids[first:stop]


def _one_row(given: Any) -> list[int]:
    rows = read_ids(given)
    num_rows = sum(len(part) for part in rows)
    if num_rows > 1:
        raise _several(num_rows)
    row: list[int] = rows[0][0].tolist()
    return row


def _several(number: int) -> ValueError:
    return ValueError(
        f"an invoke is one request with one prompt, got {number}; write one invoke for each: "
        "`for prompt in prompts: with tracer.invoke(prompt): ...`"
    )
