"""What ``/docs`` says about routes that read their body themselves.

The OpenAI routes parse their own bodies, for the limits on size and depth, so FastAPI cannot see
the request's fields: the documentation models of ``api_schemas`` are put into the schema here.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel

from api_schemas.chat import ChatCompletionRequest
from api_schemas.completions import CompletionRequest
from api_schemas.errors import ErrorResponse
from nnsight_engine.remote_backend.frames import MEDIA_TYPE as FRAMES_TYPE
from nnsight_engine.remote_backend.messages import MEDIA_TYPE as TRACE_TYPE

_REF: Final = "#/components/schemas/{model}"
_DOCUMENTED: Final[tuple[type[BaseModel], ...]] = (CompletionRequest, ChatCompletionRequest)


def _body(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


COMPLETION_BODY: Final = _body(CompletionRequest)
CHAT_BODY: Final = _body(ChatCompletionRequest)

GENERATION_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "OpenAI's answer, or its events where `stream` is true."},
    400: {"model": ErrorResponse, "description": "Something in the request cannot be served."},
    413: {"model": ErrorResponse, "description": "The body is too large."},
    422: {"model": ErrorResponse, "description": "The JSON has the wrong shape."},
    503: {"model": ErrorResponse, "description": "Starting, draining, full or dead."},
}

BINARY: Final = {"type": "string", "format": "binary"}

TRACE_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {TRACE_TYPE: {"schema": BINARY}},
    }
}

TRACE_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Frames, see docs/remote.md; what goes wrong from here on is one of them.",
        "content": {FRAMES_TYPE: {"schema": BINARY}},
    },
    400: {"model": ErrorResponse, "description": "Something in the trace cannot be served."},
    403: {"model": ErrorResponse, "description": "The server takes no code."},
    404: {"model": ErrorResponse, "description": "The trace is for another model."},
    413: {"model": ErrorResponse, "description": "The trace is too large."},
    503: {"model": ErrorResponse, "description": "Starting, draining, full or dead."},
}


_MEANINGS: Final = {
    400: "Something in the request cannot be served.",
    403: "The server takes no code.",
    404: "No such job, or the trace is for another model.",
    409: "The job's state, or what its key named before, does not allow it.",
    413: "The body is too large.",
    416: "The range begins behind the end.",
    429: "Too many jobs wait: send it again later.",
    503: "Starting, draining, full or dead.",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what a route's documentation says of the errors that it may answer with."""
    return {status: {"model": ErrorResponse, "description": _MEANINGS[status]} for status in statuses}


class DocumentedApp(FastAPI):
    """A FastAPI whose schema also has the models that routes only refer to."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema, made once."""
        if self.openapi_schema is None:
            schema = super().openapi()
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            for model in _DOCUMENTED:
                described = model.model_json_schema(ref_template=_REF)
                schemas.update(described.pop("$defs", {}))
                schemas[model.__name__] = described
        return super().openapi()
