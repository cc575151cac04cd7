"""Errors of requests: stable codes, their HTTP statuses, and OpenAI's error format.

Clients branch on ``code``; the message is for people. ``STATUS`` is the only table from code to HTTP status.
Messages quote JSON values of requests as short texts, which must be valid UTF-8.
"""

from __future__ import annotations

import enum
import reprlib
from typing import Final

from pydantic import BaseModel


class ErrorCode(enum.StrEnum):
    """Stable codes of ``error.code``."""

    INVALID_SHAPE = "invalid_shape"
    INVALID_JSON = "invalid_json"
    JSON_TOO_DEEP = "json_too_deep"
    BODY_TOO_LARGE = "body_too_large"
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
    ENGINE_CAPTURE_FULL = "engine_capture_full"
    PROMPT_WAS_CHUNKED = "prompt_was_chunked"
    INTERVENTION_FAILED = "intervention_failed"
    CODEC_NOT_ALLOWED = "codec_not_allowed"
    INVALID_TRACE = "invalid_trace"
    TRACE_FAILED = "trace_failed"
    CODE_NOT_ALLOWED = "code_not_allowed"
    HOST_NOT_ALLOWED = "host_not_allowed"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    NO_KEY = "missing_api_key"
    INVALID_KEY = "invalid_api_key"
    MISSING_SCOPE = "missing_scope"
    KEY_NOT_FOUND = "key_not_found"
    KEY_ENDED = "key_ended"
    SANDBOX_MISSING = "sandbox_missing"
    QUEUE_FULL = "queue_full"
    RATE_LIMITED = "rate_limit_exceeded"
    BEYOND_LIMIT = "request_beyond_limit"
    STORED_BYTES_FULL = "stored_bytes_full"
    UPLOAD_TIMED_OUT = "upload_timed_out"
    HEAD_TOO_LARGE = "head_too_large"
    TENANT_NOT_FOUND = "tenant_not_found"
    TRACE_TIMED_OUT = "trace_timed_out"
    TRACE_PROCESS_ENDED = "trace_process_ended"
    LOCAL_ENGINE_FAILED = "local_engine_failed"
    JOB_STORE_FULL = "job_store_full"
    JOB_NOT_FOUND = "job_not_found"
    JOB_NOT_FINISHED = "job_not_finished"
    JOB_NOT_RERUNNABLE = "job_not_rerunnable"
    JOB_CANCELLED = "job_cancelled"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    BLOCK_FAILED = "block_failed"
    INTERRUPTED = "interrupted"
    RANGE_NOT_SATISFIABLE = "range_not_satisfiable"
    RESULT_NOT_FOUND = "result_not_found"
    VECTOR_NOT_FOUND = "vector_not_found"
    VECTOR_MISMATCH = "vector_mismatch"
    VECTOR_NAME_TAKEN = "vector_name_taken"
    VECTOR_STORE_FULL = "vector_store_full"
    DETECTOR_NOT_FOUND = "detector_not_found"
    DETECTOR_MISMATCH = "detector_mismatch"
    DETECTOR_NAME_TAKEN = "detector_name_taken"
    INVALID_DETECTOR = "invalid_detector"
    PRESET_NOT_FOUND = "preset_not_found"
    PRESET_NOT_ALLOWED = "preset_not_allowed"
    PRESET_NAME_TAKEN = "preset_name_taken"
    PRESET_STORE_FULL = "preset_store_full"
    INVALID_VECTOR_FILE = "invalid_vector_file"
    UNSUPPORTED_FORMAT = "unsupported_vector_format"
    DICTIONARY_NOT_FOUND = "dictionary_not_found"
    DICTIONARY_MISMATCH = "dictionary_mismatch"
    DICTIONARY_NAME_TAKEN = "dictionary_name_taken"
    DICTIONARY_STORE_FULL = "dictionary_store_full"
    INVALID_DICTIONARY = "invalid_dictionary"
    INVALID_LABELS = "invalid_labels"
    UNSUPPORTED_DICTIONARY = "unsupported_dictionary"
    DICTIONARY_MEMORY_FULL = "dictionary_memory_full"
    HUB_NOT_ALLOWED = "hub_not_allowed"
    HUB_UNAVAILABLE = "hub_unavailable"
    TRAINING_FAILED = "training_failed"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BAD_REQUEST = "bad_request"
    STARTING = "starting"
    DRAINING = "draining"
    ENGINE_DEAD = "engine_dead"
    ENGINE_RESTARTING = "engine_restarting"
    ENGINE_PAUSED = "engine_paused"
    REPLICA_LOST = "replica_lost"
    REQUEST_TIMED_OUT = "request_timed_out"
    DATABASE_UNAVAILABLE = "database_unavailable"
    INTERNAL = "internal_error"


STATUS: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID_SHAPE: 422,
    ErrorCode.BODY_TOO_LARGE: 413,
    ErrorCode.CAPTURE_TOO_LARGE: 400,
    ErrorCode.CODEC_NOT_ALLOWED: 403,
    ErrorCode.CODE_NOT_ALLOWED: 403,
    ErrorCode.HOST_NOT_ALLOWED: 403,
    ErrorCode.ORIGIN_NOT_ALLOWED: 403,
    ErrorCode.NO_KEY: 401,
    ErrorCode.INVALID_KEY: 401,
    ErrorCode.MISSING_SCOPE: 403,
    ErrorCode.KEY_NOT_FOUND: 404,
    ErrorCode.KEY_ENDED: 409,
    ErrorCode.SANDBOX_MISSING: 403,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.STORED_BYTES_FULL: 403,
    ErrorCode.UPLOAD_TIMED_OUT: 408,
    ErrorCode.HEAD_TOO_LARGE: 431,
    ErrorCode.TENANT_NOT_FOUND: 404,
    ErrorCode.TRACE_TIMED_OUT: 504,
    ErrorCode.TRACE_PROCESS_ENDED: 500,
    ErrorCode.LOCAL_ENGINE_FAILED: 503,
    ErrorCode.JOB_STORE_FULL: 503,
    ErrorCode.JOB_NOT_FOUND: 404,
    ErrorCode.JOB_NOT_FINISHED: 409,
    ErrorCode.JOB_NOT_RERUNNABLE: 409,
    ErrorCode.JOB_CANCELLED: 409,
    ErrorCode.IDEMPOTENCY_CONFLICT: 409,
    ErrorCode.INTERRUPTED: 500,
    ErrorCode.RANGE_NOT_SATISFIABLE: 416,
    ErrorCode.RESULT_NOT_FOUND: 404,
    ErrorCode.VECTOR_NOT_FOUND: 404,
    ErrorCode.VECTOR_NAME_TAKEN: 409,
    ErrorCode.VECTOR_STORE_FULL: 503,
    ErrorCode.DETECTOR_NOT_FOUND: 404,
    ErrorCode.DETECTOR_NAME_TAKEN: 409,
    ErrorCode.PRESET_NOT_FOUND: 404,
    ErrorCode.PRESET_NOT_ALLOWED: 403,
    ErrorCode.PRESET_NAME_TAKEN: 409,
    ErrorCode.PRESET_STORE_FULL: 503,
    ErrorCode.UNSUPPORTED_FORMAT: 415,
    ErrorCode.DICTIONARY_NOT_FOUND: 404,
    ErrorCode.DICTIONARY_NAME_TAKEN: 409,
    ErrorCode.DICTIONARY_STORE_FULL: 503,
    ErrorCode.UNSUPPORTED_DICTIONARY: 415,
    ErrorCode.HUB_NOT_ALLOWED: 403,
    ErrorCode.HUB_UNAVAILABLE: 503,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.STARTING: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.ENGINE_DEAD: 503,
    ErrorCode.ENGINE_RESTARTING: 503,
    ErrorCode.ENGINE_PAUSED: 503,
    ErrorCode.REPLICA_LOST: 503,
    ErrorCode.REQUEST_TIMED_OUT: 504,
    ErrorCode.DATABASE_UNAVAILABLE: 503,
    ErrorCode.ENGINE_CAPTURE_FULL: 503,
    ErrorCode.DICTIONARY_MEMORY_FULL: 503,
    ErrorCode.PROMPT_WAS_CHUNKED: 503,
    ErrorCode.INTERVENTION_FAILED: 500,
    ErrorCode.INTERNAL: 500,
}
"""HTTP status of each code; 400 for codes that are not listed."""

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
        return STATUS.get(self.code, 400)

    def body(self) -> ErrorResponse:
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
