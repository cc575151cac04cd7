"""Validation of a client's body as one of vLLM's request models.

vLLM's models validate more than their fields: validators run on the raw body before any field is validated.
Their exceptions pass through pydantic unchanged, and they fail on types that they do not expect.
Any exception raised here is the client's mistake, since only the body is read.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMClientError, VLLMValidationError

from api_schemas.errors import ApiError, ErrorCode
from app.engine.client import JsonObject
from app.engine.vllm_refusals import RefusedError, invalid, refusals, refused

_TRANSFERS: Final = {"kv_transfer_params", "ec_transfer_params"}


async def read_request(model: type[BaseModel], body: JsonObject, *, in_thread: bool = False) -> Any:
    """Return a body as vLLM's request.

    Args:
        model: vLLM's request model.
        body: The JSON; vLLM may modify it.
        in_thread: Whether to validate in a thread, because validation may take long.

    Raises:
        ApiError: The body is invalid, or vLLM would accept it and fail later.
    """
    given, fields = dict(body), [*model.model_fields]
    try:
        try:
            validate = model.model_validate
            request = await asyncio.to_thread(validate, body) if in_thread else validate(body)
        except (ValidationError, VLLMClientError):
            raise
        except Exception as error:
            _fields_of(model).model_validate(body)  # raises for a field of a wrong type, if there is one
            raise VLLMValidationError(
                f"A field of this request cannot be read ({type(error).__name__}: {error})"
            ) from error
    except ValidationError as error:
        raise invalid(error.errors(include_url=False), given, fields) from error
    except VLLMClientError as error:
        raise refused(RefusedError.of(error), given, fields) from error
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


async def begun(
    frames: AsyncGenerator[str, None], body: JsonObject, fields: Sequence[str]
) -> AsyncIterator[str]:
    """Return vLLM's stream once its first event has arrived.

    vLLM validates much of a request only when its stream begins.

    Args:
        frames: vLLM's stream.
        body: The request's JSON.
        fields: The fields of vLLM's model of it.

    Raises:
        ApiError: The request is refused, as it would have been without streaming.
    """
    try:
        with refusals(body, fields):
            first = await anext(frames, None)
    except BaseException:
        await frames.aclose()
        raise
    return _Begun(first, frames, body, fields)


class _Begun:
    """A stream whose first event was read.

    It is not a generator: closing a generator that never started would not run its ``finally``, and the rest
    of the stream would stay open.
    """

    def __init__(
        self, first: str | None, rest: AsyncGenerator[str, None], body: JsonObject, fields: Sequence[str]
    ) -> None:
        self._first = first
        self._rest = rest
        self._body = body
        self._fields = fields

    def __aiter__(self) -> _Begun:
        return self

    async def __anext__(self) -> str:
        first, self._first = self._first, None
        with refusals(self._body, self._fields):
            return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        await self._rest.aclose()


@functools.cache
def _fields_of(model: type[BaseModel]) -> type[BaseModel]:
    """Return a model with the same fields and without the validators."""
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in model.model_fields.items()}
    return create_model(model.__name__, __config__=ConfigDict(extra="allow"), **fields)


__all__ = ["begun", "read_request"]
