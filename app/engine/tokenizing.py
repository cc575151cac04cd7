"""vLLM's requests for tokens, bounded like those for completions.

vLLM tokenizes texts of any length for whoever asks, in the one thread that all requests wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.renderers.params import TokenizeParams

from api_schemas.tokens import TokenizeMessages, TokenizeRequest


class _Text(TokenizeCompletionRequest):
    """A text that could be a prompt."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return vLLM's parameters, with the length that prompts may have."""
        return _bounded(super().build_tok_params(model_config), model_config)


class _Messages(TokenizeChatRequest):
    """A conversation that could be a prompt."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return vLLM's parameters, with the length that prompts may have."""
        return _bounded(super().build_tok_params(model_config), model_config)


def tokenize_request(wanted: TokenizeRequest) -> Any:
    """Return vLLM's request of ours; raises pydantic's ValidationError for what vLLM does not take."""
    model: type[_Text | _Messages] = _Messages if isinstance(wanted.root, TokenizeMessages) else _Text
    return model.model_validate(wanted.root.model_dump(exclude_none=True))


def texts_of(ids: Sequence[int], text_of: Callable[[int], str]) -> list[str]:
    """Return each token's text."""
    known = {token_id: text_of(token_id) for token_id in set(ids)}
    return [known[token_id] for token_id in ids]


def _bounded(params: TokenizeParams, model_config: ModelConfig) -> TokenizeParams:
    return dataclasses.replace(params, max_total_tokens=model_config.max_model_len)


__all__ = ["texts_of", "tokenize_request"]
