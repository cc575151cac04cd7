"""Validation of a client's body as one of vLLM's request models.

Their validators run on the raw body before any field is validated, pass exceptions through pydantic
unchanged, and fail on unexpected types. Any exception is the client's mistake: only the body is read. Texts
to tokenize are limited to the length of completions: all requests share vLLM's one thread for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from vllm.config import ModelConfig
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.renderers.chat_utils import ChatTemplateContentFormatOption
from vllm.renderers.params import ChatParams, TokenizeParams

from api_schemas.errors import ApiError, ErrorCode, excerpt
from api_schemas.generation import TokenizeMessages, TokenizePrompt, TokenizeRequest
from app.engine.client import JsonObject
from app.engine.vllm_errors import Refusals, RefusedError
from nnsight_engine.core.model_spec import ModelSpec

_TRANSFERS: Final = {"kv_transfer_params", "ec_transfer_params"}


async def read_request(model: type[BaseModel], body: JsonObject, *, in_thread: bool = False) -> Any:
    """Return a body as vLLM's request; ApiError if it is invalid, or vLLM would accept it and fail later."""
    fields = dict(body)  # vLLM's validators modify it
    try:
        try:
            validate = model.model_validate
            request = await asyncio.to_thread(validate, fields) if in_thread else validate(fields)
        except (ValidationError, VLLMClientError):
            raise
        except Exception as error:
            _fields_of(model).model_validate(fields)  # raises for a field of a wrong type, if there is one
            raise VLLMValidationError(
                f"A field of this request cannot be read ({type(error).__name__}: {error})"
            ) from error
    except ValidationError as error:
        raise Refusals(body, model.model_fields).invalid(error.errors(include_url=False)) from error
    except VLLMClientError as error:
        raise Refusals(body, model.model_fields).refused(RefusedError.of(error)) from error
    _check_request(request)
    return request


def _check_request(request: Any) -> None:
    """Raise ApiError for what vLLM would accept, and fail on later."""
    reserved_names = _TRANSFERS & set(getattr(request, "vllm_xargs", None) or ())
    if reserved_names:
        name = min(reserved_names)
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"`vllm_xargs` may not name {name!r}, which is an object: send it as the field `{name}`.",
            f"vllm_xargs.{name}",
        )
    tells_prompt = isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    if tells_prompt and request.stream and (request.n or 1) > 1:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "A stream with `echo` and `logprobs` has one choice for each prompt, got `n` "
            f"{request.n}: leave one of the three out, or do not stream.",
            "n",
        )


async def refusing(frames: AsyncGenerator[str, None], refusals: Refusals) -> AsyncGenerator[str, None]:
    """Yield the events of vLLM's stream; vLLM validates much only with the first one (ApiError)."""
    try:
        with refusals:
            async for frame in frames:
                yield frame
    finally:
        await frames.aclose()


@functools.cache
def _fields_of(model: type[BaseModel]) -> type[BaseModel]:
    """Return a class with the fields of one of vLLM's, without its validators."""
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in model.model_fields.items()}
    return create_model(model.__name__, __config__=ConfigDict(extra="allow"), **fields)


class _Text(TokenizeCompletionRequest):
    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return _bounded_by_context(super().build_tok_params(model_config), model_config)


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
        return _bounded_by_context(super().build_tok_params(model_config), model_config)


def ids_of(request: TokenizeRequest) -> list[int] | None:
    """Return the token ids of the request; None if it has a text or a conversation."""
    prompt = request.root.prompt if isinstance(request.root, TokenizePrompt) else None
    return prompt if isinstance(prompt, list) else None


async def tokenize_request(
    request: TokenizeRequest, spec: ModelSpec
) -> _Text | _Messages | DetokenizeRequest:
    """Return vLLM's request for ours; raises ApiError ``unknown_token``, ``invalid_value``.

    Ids need no tokens: their request is one to detokenize, with which vLLM still checks the model's name.
    """
    body = request.root.model_dump(exclude_none=True)
    ids = ids_of(request)
    if ids is None:
        model: type[_Text | _Messages] = _Messages if isinstance(request.root, TokenizeMessages) else _Text
        tokenizing: _Text | _Messages = await read_request(model, body)
        return tokenizing
    if len(ids) > spec.max_model_len:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A prompt here has at most {spec.max_model_len} tokens, got {len(ids)}; send fewer ids.",
            "prompt",
        )
    index = next((index for index, token_id in enumerate(ids) if token_id >= spec.vocab_size), None)
    if index is not None:
        raise ApiError(
            ErrorCode.UNKNOWN_TOKEN,
            f"A token's id lies between 0 and {spec.vocab_size - 1} here, got {excerpt(ids[index])}.",
            f"prompt.{index}",
        )
    detokenizing: DetokenizeRequest = await read_request(
        DetokenizeRequest, {"model": body.get("model"), "tokens": ids}
    )
    return detokenizing


def texts_of(ids: Sequence[int], text_of: Callable[[int], str]) -> list[str]:
    known = {token_id: text_of(token_id) for token_id in set(ids)}
    return [known[token_id] for token_id in ids]


def _bounded_by_context(params: TokenizeParams, model_config: ModelConfig) -> TokenizeParams:
    return dataclasses.replace(params, max_total_tokens=model_config.max_model_len)
