"""vLLM's tokenize requests, limited to the length of completions: all requests share its one thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.renderers.chat_utils import ChatTemplateContentFormatOption
from vllm.renderers.params import ChatParams, TokenizeParams

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import excerpt
from api_schemas.tokens import TokenizeMessages, TokenizePrompt, TokenizeRequest
from app.engine.vllm_requests import read_request
from nnsight_engine.core.model_spec import ModelSpec


class _Text(TokenizeCompletionRequest):
    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return _bounded(super().build_tok_params(model_config), model_config)


class _Messages(TokenizeChatRequest):
    documents: list[dict[str, str]] | None = None

    def build_chat_params(
        self, default_template: str | None, default_template_content_format: ChatTemplateContentFormatOption
    ) -> ChatParams:
        """Return vLLM's parameters with the documents, as vLLM's chat completions pass them."""
        params = super().build_chat_params(default_template, default_template_content_format)
        if self.documents is None:
            return params
        return dataclasses.replace(
            params, chat_template_kwargs={**params.chat_template_kwargs, "documents": self.documents}
        )

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return _bounded(super().build_tok_params(model_config), model_config)


def ids_of(wanted: TokenizeRequest) -> list[int] | None:
    """Return the token ids of the request; None if it has a text or a conversation."""
    prompt = wanted.root.prompt if isinstance(wanted.root, TokenizePrompt) else None
    return prompt if isinstance(prompt, list) else None


async def tokenize_request(wanted: TokenizeRequest, spec: ModelSpec) -> Any:
    """Return vLLM's request for ours; raises ApiError ``unknown_token``, ``invalid_value``."""
    body = wanted.root.model_dump(exclude_none=True)
    ids = ids_of(wanted)
    if ids is None:
        model: type[_Text | _Messages] = _Messages if isinstance(wanted.root, TokenizeMessages) else _Text
        return await read_request(model, body)
    if len(ids) > spec.max_model_len:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A prompt here has at most {spec.max_model_len} tokens, got {len(ids)}; send fewer ids.",
            "prompt",
        )
    index = next((index for index, one in enumerate(ids) if one >= spec.vocab_size), None)
    if index is not None:
        raise ApiError(
            ErrorCode.UNKNOWN_TOKEN,
            f"A token's id lies between 0 and {spec.vocab_size - 1} here, got {excerpt(ids[index])}.",
            f"prompt.{index}",
        )
    return await read_request(DetokenizeRequest, {"model": body.get("model"), "tokens": ids})


def texts_of(ids: Sequence[int], text_of: Callable[[int], str]) -> list[str]:
    known = {token_id: text_of(token_id) for token_id in set(ids)}
    return [known[token_id] for token_id in ids]


def _bounded(params: TokenizeParams, model_config: ModelConfig) -> TokenizeParams:
    return dataclasses.replace(params, max_total_tokens=model_config.max_model_len)


__all__ = ["ids_of", "texts_of", "tokenize_request"]
