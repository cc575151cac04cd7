"""A request's sampling parameters as vLLM takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams

from nnsight_engine.vllm_backend.prompts import Request


def sampling_params(request: Request, shared: Mapping[str, Any]) -> SamplingParams:
    """Return a request's sampling parameters, a copy of its own.

    Args:
        request: The request.
        shared: The trace's, which the request's own override.

    Raises:
        TypeError: There is no such parameter.
        ValueError: vLLM refuses a value.
    """
    if request.params is not None:
        params: SamplingParams = request.params.clone()
        return params
    return SamplingParams(**request.named(shared))
