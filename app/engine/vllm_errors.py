"""What vLLM raises, as errors of this server."""

from __future__ import annotations

import logging

from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from api_schemas.errors import ApiError, ErrorCode

logger = logging.getLogger(__name__)


def engine_dead() -> ApiError:
    """Return the error for an engine that has died."""
    return ApiError(ErrorCode.ENGINE_DEAD, "The engine has stopped and this server must be restarted.")


def translated(error: Exception, field: str) -> ApiError | None:
    """Return an error of vLLM's as ours, with vLLM's words; None if it is a fault and no refusal.

    Args:
        error: What was raised.
        field: What of the request it is about.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return engine_dead()
    if isinstance(error, GracefulHTTPError):
        return ApiError(ErrorCode.QUEUE_FULL, str(error), field)
    if isinstance(error, VLLMClientError):
        parameter = getattr(error, "parameter", None)
        known = parameter in SamplingParams.__struct_fields__
        return ApiError(
            ErrorCode.INVALID_VALUE, str(error), f"{field}.sampling.{parameter}" if known else field
        )
    return None
