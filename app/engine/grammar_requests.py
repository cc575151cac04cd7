"""Admission of the grammars that vLLM compiles while it validates: structural tags, and any beside tools.

All other grammars are admitted in the engine's client, see ``Grammars.accept``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import StructuredOutputsParams

from app.engine.client import JsonObject
from app.engine.vllm_requests import read_request
from nnsight_engine.vllm_backend.async_engine import InterventionAsyncLLM
from nnsight_engine.vllm_backend.grammar_process import GrammarSetup

Accept = Callable[[StructuredOutputsParams, str], Awaitable[None]]


async def read_accepted(model: type[Any], body: JsonObject, accept: Accept, tenant: str) -> Any:
    """Return a body as vLLM's request, its early-compiled grammars admitted; raises ApiError."""
    tags = _structural_tags(body)
    for tag in tags:
        await accept(StructuredOutputsParams(structural_tag=tag), tenant)
    request = await read_request(model, body, in_thread=bool(tags))
    structured = _compiled_first(request) if body.get("tools") else None
    if structured is not None:
        await accept(dataclasses.replace(structured), tenant)
    return request


def _structural_tags(body: Mapping[str, Any]) -> list[str]:
    structured, wanted = body.get("structured_outputs"), body.get("response_format")
    tags = [structured.get("structural_tag")] if isinstance(structured, dict) else []
    if isinstance(wanted, dict) and wanted.get("type") == "structural_tag":
        tags.append(json.dumps(wanted))
    return [tag for tag in tags if isinstance(tag, str)]


def _compiled_first(request: Any) -> StructuredOutputsParams | None:
    with contextlib.suppress(ValueError, TypeError, AssertionError, VLLMClientError):
        structured: StructuredOutputsParams | None = request.extract_structured_outputs()
        return structured
    return None


def setup_of(engine: InterventionAsyncLLM) -> GrammarSetup:
    model, config = engine.vllm_config.model_config, engine.vllm_config.structured_outputs_config
    return GrammarSetup(
        tokenizer=str(model.tokenizer),
        tokenizer_mode=str(model.tokenizer_mode),
        revision=model.tokenizer_revision or "",
        trust_remote_code=bool(model.trust_remote_code),
        vocab_size=model.get_vocab_size(),
        model_type=str(model.hf_config.model_type),
        is_diffusion=bool(model.is_diffusion),
        config=dataclasses.asdict(config),
    )


__all__ = ["read_accepted", "setup_of"]
