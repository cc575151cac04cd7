"""Validation of a client's body as one of vLLM's request models.

Their validators run on the raw body before any field is validated, pass exceptions through pydantic
unchanged, and fail on unexpected types. Any exception is the client's mistake: only the body is read.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMClientError, VLLMValidationError

from api_schemas.errors import ApiError, ErrorCode
from app.engine.client import JsonObject
from app.engine.vllm_refusals import Refusals, RefusedError

_TRANSFERS: Final = {"kv_transfer_params", "ec_transfer_params"}


async def read_request(model: type[BaseModel], body: JsonObject, *, in_thread: bool = False) -> Any:
    """Raise ApiError for a body that is invalid, or that vLLM would accept and fail on later."""
    own = dict(body)  # vLLM's validators modify it
    try:
        try:
            validate = model.model_validate
            request = await asyncio.to_thread(validate, own) if in_thread else validate(own)
        except (ValidationError, VLLMClientError):
            raise
        except Exception as error:
            _fields_of(model).model_validate(own)  # raises for a field of a wrong type, if there is one
            raise VLLMValidationError(
                f"A field of this request cannot be read ({type(error).__name__}: {error})"
            ) from error
    except ValidationError as error:
        raise Refusals(body, model.model_fields).invalid(error.errors(include_url=False)) from error
    except VLLMClientError as error:
        raise Refusals(body, model.model_fields).refused(RefusedError.of(error)) from error
    _check(request)
    return request


def _check(request: Any) -> None:
    named = _TRANSFERS & set(getattr(request, "vllm_xargs", None) or ())
    if named:
        name = min(named)
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


async def started_stream(frames: AsyncGenerator[str, None], refusals: Refusals) -> AsyncIterator[str]:
    """Return vLLM's stream once its first event has arrived; vLLM validates much only then (ApiError)."""
    try:
        with refusals:
            first = await anext(frames, None)
    except BaseException:
        await frames.aclose()
        raise
    return _StartedStream(first, frames, refusals)


class _StartedStream:
    """A stream whose first event was read.

    Not a generator: closing one that never started would not run its ``finally``, and leave the rest open.
    """

    def __init__(self, first: str | None, rest: AsyncGenerator[str, None], refusals: Refusals) -> None:
        self._first = first
        self._rest = rest
        self._refusals = refusals

    def __aiter__(self) -> _StartedStream:
        return self

    async def __anext__(self) -> str:
        first, self._first = self._first, None
        with self._refusals:
            return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        await self._rest.aclose()


@functools.cache
def _fields_of(model: type[BaseModel]) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in model.model_fields.items()}
    return create_model(model.__name__, __config__=ConfigDict(extra="allow"), **fields)


__all__ = ["read_request", "started_stream"]
