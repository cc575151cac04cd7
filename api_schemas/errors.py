"""Errors of requests: stable codes, their HTTP statuses, and OpenAI's error format.

Clients branch on ``code``; the message is for people. ``ErrorCode`` is the only table of codes and statuses.
Messages quote JSON values of requests as short texts, which must be valid UTF-8.
"""

from __future__ import annotations

import enum
import reprlib
from typing import Final, Self

from pydantic import BaseModel


class ErrorCode(enum.StrEnum):
    """Stable codes of ``error.code``, each with its HTTP status, which is 400 where none is given."""

    status: int

    def __new__(cls, code: str, status: int = 400) -> Self:
        """Return a member; its value is the code."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.status = status
        return member

    INVALID_SHAPE = "invalid_shape", 422
    INVALID_JSON = "invalid_json"
    JSON_TOO_DEEP = "json_too_deep"
    BODY_TOO_LARGE = "body_too_large", 413
    TENSOR_TOO_LARGE = "tensor_too_large"
    UNKNOWN_OPERATION = "unknown_operation"
    UNKNOWN_POINT = "unknown_point"
    UNKNOWN_LAYER = "unknown_layer"
    UNSUPPORTED_AT_POINT = "unsupported_at_point"
    WRONG_WIDTH = "wrong_width"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_ENCODING = "wrong_encoding"
    NOT_FINITE = "not_finite"
    EMPTY_WHERE = "empty_where"
    CONTRADICTORY_WHERE = "contradictory_where"
    POSITION_OUT_OF_RANGE = "position_out_of_range"
    UNKNOWN_TOKEN = "unknown_token"
    UNKNOWN_VECTOR = "unknown_vector"
    UNKNOWN_DETECTOR = "unknown_detector"
    UNKNOWN_DICTIONARY = "unknown_dictionary"
    UNKNOWN_FEATURE = "unknown_feature"
    INVALID_VALUE = "invalid_value"
    DUPLICATE_NAME = "duplicate_name"
    UNSUPPORTED_COMBINATION = "unsupported_combination"
    TOO_MANY_OPERATIONS = "too_many_operations"
    CAPTURE_TOO_LARGE = "capture_too_large"
    TOO_MUCH_WORK = "too_much_work"
    ENGINE_CAPTURE_FULL = "engine_capture_full", 503
    PROMPT_WAS_CHUNKED = "prompt_was_chunked", 503
    INTERVENTION_FAILED = "intervention_failed", 500
    CODEC_NOT_ALLOWED = "codec_not_allowed", 403
    INVALID_TRACE = "invalid_trace"
    TRACE_FAILED = "trace_failed"
    CODE_NOT_ALLOWED = "code_not_allowed", 403
    HOST_NOT_ALLOWED = "host_not_allowed", 403
    ORIGIN_NOT_ALLOWED = "origin_not_allowed", 403
    NO_KEY = "missing_api_key", 401
    INVALID_KEY = "invalid_api_key", 401
    MISSING_SCOPE = "missing_scope", 403
    KEY_NOT_FOUND = "key_not_found", 404
    KEY_ENDED = "key_ended", 409
    SANDBOX_MISSING = "sandbox_missing", 403
    QUEUE_FULL = "queue_full", 429
    RATE_LIMITED = "rate_limit_exceeded", 429
    BEYOND_LIMIT = "request_beyond_limit"
    STORED_BYTES_FULL = "stored_bytes_full", 403
    UPLOAD_TIMED_OUT = "upload_timed_out", 408
    HEAD_TOO_LARGE = "head_too_large", 431
    TENANT_NOT_FOUND = "tenant_not_found", 404
    TRACE_TIMED_OUT = "trace_timed_out", 504
    TRACE_PROCESS_ENDED = "trace_process_ended", 500
    LOCAL_ENGINE_FAILED = "local_engine_failed", 503
    JOB_STORE_FULL = "job_store_full", 503
    JOB_NOT_FOUND = "job_not_found", 404
    JOB_NOT_FINISHED = "job_not_finished", 409
    JOB_NOT_RERUNNABLE = "job_not_rerunnable", 409
    JOB_CANCELLED = "job_cancelled", 409
    IDEMPOTENCY_CONFLICT = "idempotency_conflict", 409
    BLOCK_FAILED = "block_failed"
    INTERRUPTED = "interrupted", 500
    RANGE_NOT_SATISFIABLE = "range_not_satisfiable", 416
    RESULT_NOT_FOUND = "result_not_found", 404
    VECTOR_NOT_FOUND = "vector_not_found", 404
    VECTOR_MISMATCH = "vector_mismatch"
    VECTOR_NAME_TAKEN = "vector_name_taken", 409
    VECTOR_STORE_FULL = "vector_store_full", 503
    DETECTOR_NOT_FOUND = "detector_not_found", 404
    DETECTOR_MISMATCH = "detector_mismatch"
    DETECTOR_NAME_TAKEN = "detector_name_taken", 409
    INVALID_DETECTOR = "invalid_detector"
    PRESET_NOT_FOUND = "preset_not_found", 404
    PRESET_NOT_ALLOWED = "preset_not_allowed", 403
    PRESET_NAME_TAKEN = "preset_name_taken", 409
    PRESET_STORE_FULL = "preset_store_full", 503
    INVALID_VECTOR_FILE = "invalid_vector_file"
    UNSUPPORTED_FORMAT = "unsupported_vector_format", 415
    DICTIONARY_NOT_FOUND = "dictionary_not_found", 404
    DICTIONARY_MISMATCH = "dictionary_mismatch"
    DICTIONARY_NAME_TAKEN = "dictionary_name_taken", 409
    DICTIONARY_STORE_FULL = "dictionary_store_full", 503
    INVALID_DICTIONARY = "invalid_dictionary"
    INVALID_LABELS = "invalid_labels"
    UNSUPPORTED_DICTIONARY = "unsupported_dictionary", 415
    DICTIONARY_MEMORY_FULL = "dictionary_memory_full", 503
    HUB_NOT_ALLOWED = "hub_not_allowed", 403
    HUB_UNAVAILABLE = "hub_unavailable", 503
    TRAINING_FAILED = "training_failed"
    MODEL_NOT_FOUND = "model_not_found", 404
    NOT_FOUND = "not_found", 404
    METHOD_NOT_ALLOWED = "method_not_allowed", 405
    BAD_REQUEST = "bad_request"
    STARTING = "starting", 503
    DRAINING = "draining", 503
    ENGINE_DEAD = "engine_dead", 503
    ENGINE_RESTARTING = "engine_restarting", 503
    ENGINE_PAUSED = "engine_paused", 503
    REPLICA_LOST = "replica_lost", 503
    REQUEST_TIMED_OUT = "request_timed_out", 504
    DATABASE_UNAVAILABLE = "database_unavailable", 503
    INTERNAL = "internal_error", 500


_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorInfo(BaseModel):
    """The content of OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str


class ErrorResponse(BaseModel):
    """OpenAI's error object."""

    error: ErrorInfo


class ApiError(Exception):
    """A request that cannot be served, with a stable code and a message for people.

    Args:
        code: The kind of the error.
        message: The rule, the value, the next step.
        param: The offending field, as a path such as ``interventions.0.at``.
    """

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    @property
    def status(self) -> int:
        return self.code.status

    def body(self) -> ErrorResponse:
        """Return OpenAI's error object, whose type follows from the status."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return ErrorResponse(
            error=ErrorInfo(message=self.message, type=kind, param=self.param, code=self.code)
        )


_MAX_CHARACTERS: Final = 64
_MAX_ITEMS: Final = 4
_MAX_BITS: Final = 64


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = self.maxdict = _MAX_ITEMS
        self.maxstring = self.maxother = _MAX_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to convert very long integers to text.
        del level
        return str(x) if x.bit_length() <= _MAX_BITS else f"an integer of {x.bit_length()} bits"


def excerpt(value: object) -> str:
    return printable(_Repr().repr(value))


def clip(text: str) -> str:
    """Return the text without quotes, shortened if it is long."""
    return printable(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…")


def printable(text: str) -> str:
    """Return the text with lone surrogates escaped, which could not be encoded."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
