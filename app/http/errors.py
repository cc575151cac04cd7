"""Converts exceptions to OpenAI's or Anthropic's error object; internal details are only logged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from api_schemas.errors import ApiError, ErrorCode, clip, printable
from api_schemas.fields import RequestLimits
from api_schemas.interventions import path_in
from app.http.contexts import note_error
from app.http.vllm_routes import MESSAGES
from app.limits.limit import ThrottledError

RETRY_AFTER_S: Final = 5
"""The default Retry-After for a server that is starting, full or draining."""

_WORTH_WAITING: Final = {429, 503}
_MAX_PROBLEMS: Final = 5

_MID_BODY: Final = frozenset({ErrorCode.UPLOAD_TIMED_OUT, ErrorCode.REQUEST_TIMED_OUT})

_CHALLENGES: Final = {
    ErrorCode.NO_KEY: "Bearer",
    ErrorCode.INVALID_KEY: 'Bearer error="invalid_token"',
}

_TYPES_OF_MESSAGES: Final = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
"""Anthropic's names of types that OpenAI's API calls otherwise."""

DONE_FRAME: Final = "data: [DONE]\n\n"

T = TypeVar("T", bound=BaseModel)

_OUR_CODES: Final = frozenset(code.value for code in ErrorCode)
_VALUE_CODES: Final = {"finite_number": ErrorCode.NOT_FINITE}

_CODES: Final = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.METHOD_NOT_ALLOWED}


def error_fields(error: ApiError) -> dict[str, Any]:
    """Return the content of the error object, whatever characters of the request the message contains."""
    # A lone surrogate, legal in JSON, would fail pydantic's validation and the UTF-8 encoder.
    param = None if error.param is None else printable(error.param)
    return ApiError(error.code, printable(error.message), param).body().error.model_dump(mode="json")


def error_bytes(error: ApiError) -> bytes:
    return _compact_json({"error": error_fields(error)})


def message_error_bytes(error: ApiError) -> bytes:
    """Return the error object of Anthropic's API."""
    fields = error_fields(error)
    renamed = {**fields, "type": _TYPES_OF_MESSAGES.get(fields["type"], fields["type"])}
    return _compact_json({"type": "error", "error": renamed})


def _compact_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """Return an error as a response, with the headers that its code or status needs."""
    fields = dict(headers or {})
    if error.code in _CHALLENGES:
        fields.setdefault("WWW-Authenticate", _CHALLENGES[error.code])
    if error.code in _MID_BODY:
        fields.setdefault("Connection", "close")  # the rest of the body would be parsed as the next request
    if error.status in _WORTH_WAITING:
        fields.setdefault("Retry-After", str(RETRY_AFTER_S))
    return _ErrorResponse(error, fields)


class _ErrorResponse(Response):
    """An error as a response, in the form of its route's API; when sent, its code goes into the record."""

    def __init__(self, error: ApiError, headers: dict[str, str]) -> None:
        super().__init__(error_bytes(error), error.status, headers, media_type="application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error.code)
        if scope["path"].startswith(MESSAGES):
            self.body = message_error_bytes(self._error)
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send, *, code: int) -> None:
    """Answer a request, or an unaccepted WebSocket; ``code`` closes one if denial responses are missing."""
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": code, "reason": error.code})
        return
    await error_response(error)(scope, receive, send)


def error_frame(error: ApiError) -> str:
    return f"data: {error_bytes(error).decode('ascii')}\n\n"


def internal_error() -> ApiError:
    return ApiError(
        ErrorCode.INTERNAL,
        "The server failed on this request and has logged why; the request may be sent again.",
    )


def problem_text(problems: Sequence[Mapping[str, Any]]) -> str:
    """Return pydantic's problems as text: locations and reasons, without values or server internals."""
    return "; ".join(
        f"{'.'.join(clip(str(part)) for part in problem['loc'])}: {problem['msg']}"
        for problem in problems[:_MAX_PROBLEMS]
    )


def validated(model: type[T], value: object, limits: RequestLimits | None = None) -> T:
    """Validate a body as its model; raises ``invalid_shape``, or the code that the model itself reported."""
    try:
        return model.model_validate(value, context=limits)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems: list[dict[str, Any]] = [{**problem, "loc": _path_of(value, problem)} for problem in errors]
        kind = str(problems[0]["type"])
        code = ErrorCode(kind) if kind in _OUR_CODES else _VALUE_CODES.get(kind, ErrorCode.INVALID_SHAPE)
        param = ".".join(clip(str(part)) for part in problems[0]["loc"]) or None
        raise ApiError(code, f"The body does not fit this route: {problem_text(problems)}.", param) from error


def _path_of(value: object, problem: Mapping[str, Any]) -> list[str]:
    """Return where a problem is in the body that was sent; errors of ours may name a field within it."""
    field = problem.get("ctx", {}).get("field", "") if problem["type"] in _OUR_CODES else ""
    path = path_in(value, problem["loc"], keep_last=problem["type"] == "missing")
    return [*path, *field.split(".")] if field else path


def install_error_handlers(app: Starlette) -> None:
    """Install handlers for the framework's errors and ours; other exceptions propagate to the middleware."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)


async def _on_api_error(connection: HTTPConnection, exc: Exception) -> Response:
    headers = exc.headers if isinstance(exc, ThrottledError) else None
    response = error_response(exc if isinstance(exc, ApiError) else internal_error(), headers)
    if isinstance(connection, WebSocket):
        await connection.send_denial_response(response)
    return response


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    if not isinstance(exc, HTTPException):
        return error_response(internal_error())
    code = _CODES.get(exc.status_code, ErrorCode.BAD_REQUEST)
    message = f"{exc.detail}: {request.method} {request.url.path}; /docs lists what this server offers."
    return error_response(ApiError(code, message), dict(exc.headers or {}))


async def _on_validation_error(_request: Request, exc: Exception) -> Response:
    problems = exc.errors() if isinstance(exc, RequestValidationError) else []
    message = f"The request does not fit the route: {problem_text(problems)}"
    return error_response(ApiError(ErrorCode.INVALID_SHAPE, message))
