from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

from vllm import SamplingParams
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from api_schemas.errors import ApiError, ErrorCode
from app.engine.vllm_refusals import TOO_LARGE, Refusals, RefusedError

logger = logging.getLogger(__name__)

_CLIENTS: Final = (VLLMClientError, ValueError, TypeError)
"""Exceptions that mean a wrong request, also to vLLM."""

_PROMPT: Final = "prompt"


def engine_dead() -> ApiError:
    return ApiError(
        ErrorCode.ENGINE_DEAD,
        "The engine has stopped while it worked on this; GET /health/ready turns 200 when one serves again.",
    )


def cause_of(error: Exception) -> Exception:
    """Return the cause of an error in which vLLM says only that it could not generate.

    Numbers or texts that cannot be serialized for the engine's process arrive this way, and so do arithmetic
    overflows in computations with the request's own numbers.
    """
    reason = error.__cause__ if isinstance(error, EngineGenerateError) else error
    if isinstance(reason, ArithmeticError):
        refusal: Exception = VLLMValidationError(f"{TOO_LARGE} ({reason})")
        return refusal
    return reason if isinstance(reason, _CLIENTS) else error


@contextlib.contextmanager
def translating_engine_death() -> Iterator[None]:
    """Raise ``engine_dead`` where vLLM raises ``EngineDeadError`` in the block."""
    try:
        yield
    except EngineDeadError as error:
        raise engine_dead() from error


def raise_stream_errors(serving: Any) -> None:
    """Make the streams of a vLLM serving class raise the errors that vLLM would send as an event."""

    def create(message: str | Exception, *_args: Any, **_kwargs: Any) -> str:
        if isinstance(message, str):
            raise RefusedError(message)
        raise raised(message) from message

    serving.create_streaming_error_response = create


def raise_message_errors(serving: Any) -> None:
    """Have a vLLM serving class of Anthropic's messages name the errors that are not the server's own.

    vLLM answers an error of the engine's checks with status 500, and one in a stream as ``internal_error``.
    """
    raise_stream_errors(serving)
    create, convert = serving.create_messages, serving.message_stream_converter

    async def create_messages(request: Any, raw_request: Any = None) -> Any:
        try:
            return await create(request, raw_request)
        except Exception as error:  # noqa: BLE001 - vLLM's route answers all of them
            return answer_of(error)

    async def message_stream_converter(frames: AsyncIterator[str]) -> AsyncIterator[str]:
        failures: list[Exception] = []

        async def watched() -> AsyncIterator[str]:
            try:
                async for frame in frames:
                    yield frame
            except Exception as error:
                failures.append(error)
                raise

        async for event in convert(watched()):
            if failures:  # the event is the converter's form of it
                (failure,) = failures
                raise Refusals({}, ()).refused(failure) if isinstance(failure, RefusedError) else failure
            yield event

    serving.create_messages = create_messages
    serving.message_stream_converter = message_stream_converter


def answer_of(error: Exception) -> ErrorResponse:
    found = raised(error)
    if isinstance(found, RefusedError):
        refused: ErrorResponse = create_error_response(cause_of(error))
        return refused
    info = found.body().error
    return ErrorResponse(
        error=ErrorInfo(message=info.message, type=info.type, param=info.param, code=found.status)
    )


def raised(error: Exception) -> ApiError | RefusedError:
    """Return an exception that vLLM raised while it served a request, as an error of ours or as a refusal."""
    for one in (error, error.__cause__):
        if isinstance(one, ApiError):
            return one
        if isinstance(one, EngineDeadError):
            return engine_dead()
    refusal = RefusedError.of(cause_of(error))
    # Only the type is logged: the message may quote the request.
    log = logger.error if refusal.status == HTTPStatus.INTERNAL_SERVER_ERROR else logger.info
    log("vLLM refused a request with %s", type(error).__name__)
    return refusal


def translated(error: Exception, field: str, given: Mapping[str, Any]) -> ApiError | None:
    """Return vLLM's error about a request of a trace as ours; None if it is a fault, not a refusal."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return engine_dead()
    if isinstance(error, GracefulHTTPError):
        return ApiError(ErrorCode.QUEUE_FULL, str(error), field)
    if isinstance(error, VLLMClientError):
        names = SamplingParams.__struct_fields__
        made = Refusals(given, (*names, _PROMPT)).refused(RefusedError.of(error))
        top = (made.param or "").partition(".")[0]
        place = f".sampling.{made.param}" if top in names else f".{_PROMPT}" if top == _PROMPT else ""
        return ApiError(made.code, made.message, f"{field}{place}")
    return None
