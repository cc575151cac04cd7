"""A client's body as one of vLLM's request models, or vLLM's own words on why it is none.

vLLM's models check more than their fields: validators run on the raw body before any field is looked at.
What those refuse comes through pydantic as it is raised, and they trip over types that they do not expect.
Whatever goes wrong in here is the client's mistake: nothing but the body is looked at.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from starlette.requests import Request
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.exceptions import VLLMClientError, VLLMValidationError

from api_schemas.errors import ApiError, ErrorCode
from app.engine.client import EngineReply, JsonObject

_TRANSFERS: Final = {"kv_transfer_params", "ec_transfer_params"}
_ERROR: Final = 'data: {"error"'


class RefusedError(Exception):
    """A request that vLLM refuses.

    Attributes:
        reply: The answer, as vLLM's own server words it.
    """

    def __init__(self, reply: EngineReply) -> None:
        """Keep the answer."""
        super().__init__()
        self.reply = reply


async def read_request(
    model: type[BaseModel], body: JsonObject, http: Request, *, in_thread: bool = False
) -> Any:
    """Return a body as vLLM's request.

    Args:
        model: vLLM's.
        body: The JSON; vLLM may change it.
        http: With vLLM's application.
        in_thread: Validate in a thread, because that may take long.

    Raises:
        RefusedError: It is none.
        ApiError: vLLM would take it, and fail.
    """
    try:
        try:
            validate = model.model_validate
            request = await asyncio.to_thread(validate, body) if in_thread else validate(body)
        except (ValidationError, VLLMClientError):
            raise
        except Exception as error:
            _fields_of(model).model_validate(body)  # says which field has a wrong type, if one has
            raise VLLMValidationError(
                f"A field of this request cannot be read ({type(error).__name__}: {error}); compare its "
                "fields' types with /docs."
            ) from error
    except ValidationError as error:
        # As vLLM's own server does, whose framework puts `body` before each field.
        errors = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
        response = await validation_exception_handler(http, RequestValidationError(errors))
        reply = EngineReply(status=response.status_code, body=json.loads(bytes(response.body)))
        raise RefusedError(reply) from error
    except VLLMClientError as error:
        raise RefusedError(error_reply(create_error_response(error))) from error
    _check(request)
    return request


def _check(request: Any) -> None:
    """Raise ApiError for what vLLM takes and trips over later."""
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


def error_reply(answer: ErrorResponse) -> EngineReply:
    """Return an error of vLLM's as an answer."""
    status = answer.error.code
    return EngineReply(status=status if isinstance(status, int) else 400, body=answer.model_dump())


async def begun(frames: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """Return a stream of vLLM's whose first event is there and is no error.

    vLLM looks at much of a request only when its stream begins, and tells in an event what is wrong.

    Raises:
        RefusedError: The first event is an error, which the whole answer would have been too.
    """
    try:
        first = await anext(frames, None)
    except BaseException:
        await frames.aclose()
        raise
    if first is not None and first.startswith(_ERROR):
        await frames.aclose()
        body = json.loads(first.removeprefix("data: "))
        raise RefusedError(EngineReply(status=body["error"]["code"], body=body))
    return _Begun(first, frames)


class _Begun:
    """A stream whose first event was taken; no generator, which would not close one that it never began."""

    def __init__(self, first: str | None, rest: AsyncGenerator[str, None]) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> _Begun:
        return self

    async def __anext__(self) -> str:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        await self._rest.aclose()


@functools.cache
def _fields_of(model: type[BaseModel]) -> type[BaseModel]:
    """Return a model of the same fields without its validators."""
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in model.model_fields.items()}
    return create_model(model.__name__, __config__=ConfigDict(extra="allow"), **fields)


__all__ = ["RefusedError", "begun", "error_reply", "read_request"]
