"""Requests compiled from the JSON of their operations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import parse_interventions
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.token_texts import NoSuchTokenError
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.request_plan import (
    NO_MARKERS,
    NO_MEDIA,
    AnswerMarkers,
    CompiledRequest,
    PromptMedia,
)


def token_of(text: str) -> int:
    """One token per word; a word's id is its length."""
    ids = [len(word) for word in text.split()]
    if len(ids) != 1:
        raise NoSuchTokenError(f"is {len(ids)}: {ids}")
    return ids[0]


def compiled(
    *raw: dict[str, Any],
    spec: ModelSpec,
    prompt: Sequence[int],
    max_tokens: int = 4,
    stream: bool = False,
    token_of: Callable[[str], int] = token_of,
    media: PromptMedia = NO_MEDIA,
    markers: AnswerMarkers = NO_MARKERS,
    prompt_logprobs: bool = False,
    max_text_bytes: int = 0,
) -> CompiledRequest:
    """Return a request of a model."""
    return compile_request(
        parse_interventions(list(raw)),
        spec=spec,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        token_of=token_of,
        stream=stream,
        media=media,
        markers=markers,
        prompt_logprobs=prompt_logprobs,
        max_text_bytes=max_text_bytes,
    )


def tensors_of(request: CompiledRequest) -> dict[str, tuple[str, list[int], bytes]]:
    """Return a request's tensors as they reach a worker."""
    return {key: (one.dtype, list(one.shape), one.data) for key, one in request.tensors.items()}


def captured_bytes(*raw: dict[str, Any], spec: ModelSpec, prompt: list[int]) -> int:
    """Return the bytes that a request captures of its prompt, as the refusal of too many says."""
    try:
        compiled(*raw, spec=dataclasses.replace(spec, max_capture_bytes=0), prompt=prompt, max_tokens=20)
    except ApiError as error:
        if error.code != ErrorCode.CAPTURE_TOO_LARGE:
            raise
        (num_bytes,) = re.findall(r"asks for (\d+)", error.message)
        return int(num_bytes)
    return 0
