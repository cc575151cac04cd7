"""Conversion of a trace's input to vLLM's prompt and sampling parameters.

No input that matters to a decoder is silently ignored: it takes effect or is rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch

from nnsight_engine.modeling.rows import read_ids

_OTHER_NAMES: Final = {"max_new_tokens": "max_tokens"}
"""Transformers' names of parameters to vLLM's."""

_IDS: Final = "input_ids"
_MASK: Final = "attention_mask"
_MEDIA: Final = "multi_modal_data"
INPUT_NAMES: Final = (_IDS, _MASK, "token_type_ids")
"""The names in a tokenizer's output. Token types matter to encoders only, so they are accepted and ignored.
"""

_NESTED: Final = (str, Mapping, list, tuple)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One invoke's prompt and options, None for the trace's. Named parameters override ``params``."""

    prompt: dict[str, Any]
    sampling: Mapping[str, Any]
    params: Any = None
    edits: Any = None
    lora_request: Any = None

    def sampling_over(self, shared: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a parameter object or None, and named ones over it; raise TypeError if one has no effect."""
        trace = _by_name(shared)
        params = trace.pop("sampling_params", None)
        sampling = _by_name(self.sampling)
        if self.params is not None:
            if trace:
                raise TypeError(
                    "an invoke's sampling_params= sets all parameters, so those of the trace would have no "
                    f"effect: {', '.join(sorted(trace))}. Pass the invoke's by name, or none to the trace"
                )
            return self.params, sampling
        if params is None:
            trace.setdefault("max_tokens", 1)
        return params, {**trace, **sampling}


def as_prompt(*inputs: Any, **named: Any) -> dict[str, Any]:
    """Return a prompt as vLLM accepts it.

    Args:
        *inputs: Text; token ids as a list, an array or a tensor, ``[tokens]`` or ``[1, tokens]``; a
            tokenizer's output; a prompt in vLLM's format; or a list that holds one of these.
        **named: A tokenizer's output, by name.

    Raises:
        ValueError: There are several prompts, or none.
        TypeError: The input has another type.
    """
    if inputs and named:
        raise TypeError(f"an invoke takes one prompt, got one and {', '.join(named)}")
    if len(inputs) > 1:
        raise TypeError(f"an invoke takes one prompt, got {len(inputs)} positional arguments")
    text_or_tokens = inputs[0] if inputs else named
    while (
        isinstance(text_or_tokens, list | tuple)
        and len(text_or_tokens) == 1
        and isinstance(text_or_tokens[0], _NESTED)
    ):
        text_or_tokens = text_or_tokens[0]
    if isinstance(text_or_tokens, str):
        return {"prompt": str(text_or_tokens)}
    if isinstance(text_or_tokens, list | tuple) and any(
        isinstance(item, str | Mapping) for item in text_or_tokens
    ):
        raise _several(len(text_or_tokens))
    if not isinstance(text_or_tokens, Mapping):
        return {"prompt_token_ids": _one_row(text_or_tokens)}
    if any(name in text_or_tokens for name in INPUT_NAMES):
        return _tokenized(text_or_tokens)
    prompt = dict(text_or_tokens)
    if "prompt_token_ids" in prompt:
        prompt["prompt_token_ids"] = _one_row(prompt["prompt_token_ids"])
    return prompt


def with_images(prompt: dict[str, Any], images: Any) -> dict[str, Any]:
    """Return a prompt with an image or several, if any; raise TypeError if it has images already."""
    if images is None:
        return prompt
    if prompt.get(_MEDIA) is not None:
        raise TypeError(f"images= and {_MEDIA} are the same input, got both; give one of them")
    return {**prompt, _MEDIA: {"image": list(images) if isinstance(images, list | tuple) else [images]}}


def refuse_function(options: Mapping[str, Any]) -> None:
    if options.get("fn") is not None:
        raise TypeError("fn= is not supported on vLLM: a trace there is a request, and the engine runs it")


def _by_name(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters under vLLM's names; raise TypeError for private and for repeated ones."""
    private = [name for name in fields if name.startswith("_")]
    if private:
        raise TypeError(
            f"{private[0]} is private: vLLM derives it from other sampling parameters; leave it out"
        )
    for other, name in _OTHER_NAMES.items():
        if other in fields and name in fields:
            raise TypeError(f"{other} and {name} are the same parameter, got both; give one of them")
    return {_OTHER_NAMES.get(name, name): value for name, value in fields.items()}


def _tokenized(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's output as a prompt of ids, without padding."""
    others = sorted(set(fields) - set(INPUT_NAMES))
    if others or fields.get(_IDS) is None:
        got = f"got {', '.join(map(str, fields))}"
        raise TypeError(
            f"tokens for vLLM are input_ids, perhaps with an attention_mask, {got}. Other prompts of "
            'vLLM\'s are {"prompt": text, …} and {"prompt_token_ids": ids, …}'
        )
    ids = _one_row(fields[_IDS])
    if fields.get(_MASK) is not None:
        ids = _unfilled(ids, fields[_MASK])
    return {"prompt_token_ids": ids}


def _unfilled(ids: list[int], mask: Any) -> list[int]:
    """Return the tokens without the padding at either end, according to the mask."""
    kept = torch.as_tensor(mask).ne(0).flatten().tolist()
    if len(kept) != len(ids):
        raise ValueError(f"attention_mask has {len(kept)} entries for {len(ids)} tokens")
    if True not in kept:
        raise ValueError("attention_mask leaves no token of the prompt")
    start, stop = kept.index(True), len(kept) - kept[::-1].index(True)
    if not all(kept[start:stop]):
        raise ValueError(
            "attention_mask hides tokens between others, which vLLM cannot; leave those tokens out of the "
            "prompt, or trace a LanguageModel"
        )
    return ids[start:stop]


def _one_row(token_ids: Any) -> list[int]:
    """Return the ids of a single prompt; raise ValueError if there are several."""
    batches = read_ids(token_ids)
    num_rows = sum(len(batch) for batch in batches)
    if num_rows > 1:
        raise _several(num_rows)
    row: list[int] = batches[0][0].tolist()
    return row


def _several(number: int) -> ValueError:
    return ValueError(
        f"an invoke is one request with one prompt, got {number}; write one invoke for each: "
        "`for prompt in prompts: with tracer.invoke(prompt): ...`"
    )
