"""Validation of a client's body as one of vLLM's request models.

vLLM's models validate more than their fields: validators run on the raw body before any field is validated.
Their exceptions pass through pydantic unchanged, and they fail on types that they do not expect.
Any exception raised here is the client's mistake, since only the body is read.
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
    """Validate a body, and return it as an instance of vLLM's request model.

    Args:
        model: vLLM's request model.
        body: The JSON.
        in_thread: Whether to validate in a thread, because validation may take long.

    Raises:
        ApiError: The body is invalid, or vLLM would accept it and fail later.
    """
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
    """Raise ApiError for requests that vLLM accepts and fails on later."""
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
    """Return vLLM's stream once its first event has arrived.

    vLLM validates much of a request only when its stream begins.

    Args:
        frames: vLLM's stream.
        refusals: The errors for vLLM's refusals of the request's body.

    Raises:
        ApiError: The request is refused, as it would have been without streaming.
    """
    try:
        with refusals:
            first = await anext(frames, None)
    except BaseException:
        await frames.aclose()
        raise
    return _StartedStream(first, frames, refusals)


class _StartedStream:
    """A stream whose first event was read.

    It is not a generator: closing a generator that never started would not run its ``finally``, and the rest
    of the stream would stay open.
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
    """Return a model with the same fields and without the validators."""
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in model.model_fields.items()}
    return create_model(model.__name__, __config__=ConfigDict(extra="allow"), **fields)


__all__ = ["read_request", "started_stream"]
