"""Completes the OpenAPI document for routes that read their body themselves, to enforce size and depth.

It also has the query parameters of several routes, and links: which ids in a response are parameters of which
other routes. A link without a route or a response raises KeyError when the document is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from pydantic import BaseModel

from api_schemas.errors import ErrorResponse
from api_schemas.fields import NAME_PATTERN
from api_schemas.generation import (
    ChatCompletionRequest,
    CompletionRequest,
)
from api_schemas.jobs import JobEvent
from nnsight_engine.remote_backend.frames import MEDIA_TYPE as FRAMES_TYPE
from nnsight_engine.remote_backend.messages import MEDIA_TYPE as TRACE_TYPE

Links = Mapping[str, Mapping[str, str]]
"""Parameters by target route (``METHOD /path``); each is a runtime expression on the response."""

_ID: Final = "$response.body#/id"
_TENANT: Final = {"tenant": "$response.body#/tenant"}
_JOBS: Final[Links] = {
    route: {"job_id": _ID}
    for route in (
        "GET /v1/jobs/{job_id}", "GET /v1/jobs/{job_id}/events", "GET /v1/jobs/{job_id}/result",
        "POST /v1/jobs/{job_id}/cancel", "POST /v1/jobs/{job_id}/rerun", "DELETE /v1/jobs/{job_id}",
    )
}  # fmt: skip
_KEYS: Final[Links] = {
    "POST /v1/admin/keys/{key_id}/rotate": {"key_id": _ID},
    "DELETE /v1/admin/keys/{key_id}": {"key_id": _ID},
    "GET /v1/admin/keys": _TENANT,
    "PUT /v1/admin/tenants/{tenant}/limits": _TENANT,
}


def _links_of_stored(kind: str, parameter: str, *parts: str, field: str = "id") -> Links:
    """Return the links of a stored thing to itself, to ``parts`` of it (``METHOD /PART``), to its list."""
    routes = [route.partition(" ") for route in ("GET ", "DELETE ", *parts)]
    parameters = {parameter: f"$response.body#/{field}"}
    return {
        **{f"{method} /v1/{kind}/{{{parameter}}}{part}": parameters for method, _, part in routes},
        f"GET /v1/{kind}": {"name": "$response.body#/name", "after": _ID},
    }


_VECTORS: Final = _links_of_stored("vectors", "vector_id", "GET /content")
_DETECTORS: Final = _links_of_stored("detectors", "detector_id", "GET /content")
_DICTIONARIES: Final = _links_of_stored(
    "dictionaries", "dictionary_id", "GET /content", "GET /config", "GET /features", "PUT /labels"
)
_PRESETS: Final = _links_of_stored("presets", "preset", field="name")
LINKS: Final[Mapping[tuple[str, int], Links]] = {
    ("POST /v1/jobs", 200): _JOBS,
    ("POST /v1/jobs", 202): _JOBS,
    ("POST /v1/jobs/{job_id}/cancel", 200): _JOBS,
    ("POST /v1/jobs/{job_id}/rerun", 202): _JOBS,
    ("POST /v1/vectors", 201): _VECTORS,
    ("POST /v1/vectors/train", 201): _VECTORS,
    ("POST /v1/detectors", 201): _DETECTORS,
    ("POST /v1/detectors/train", 201): _DETECTORS,
    ("POST /v1/dictionaries", 201): _DICTIONARIES,
    ("POST /v1/presets", 201): _PRESETS,
    ("PUT /v1/presets", 200): _PRESETS,
    ("PUT /v1/presets", 201): _PRESETS,
    ("POST /v1/admin/keys", 201): _KEYS,
    ("POST /v1/admin/keys/{key_id}/rotate", 201): _KEYS,
    **{
        (f"GET /v1/{kind}", 200): {f"GET /v1/{kind}": {"after": "$response.body#/last_id"}}
        for kind in ("jobs", "vectors", "detectors", "dictionaries", "presets")
    },
}
"""The links of each response, by source route and status."""


def add_links(paths: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Add ``LINKS`` to the paths of an OpenAPI document."""
    for (source, status), links in LINKS.items():
        responses = _operation(paths, source)["responses"]
        for target, parameters in links.items():
            name = _operation(paths, target)["operationId"]
            response_links = responses[str(status)].setdefault("links", {})
            response_links[name] = {"operationId": name, "parameters": dict(parameters)}


def _operation(paths: dict[str, dict[str, dict[str, Any]]], route: str) -> dict[str, Any]:
    method, path = route.split(" ", 1)
    return paths[path][method.lower()]


EVENTS_TYPE: Final = "text/event-stream"
SAFETENSORS_TYPE: Final = "application/safetensors"
_REF: Final = "#/components/schemas/{model}"
_documented: dict[str, type[BaseModel]] = {}
"""The models to which routes only refer; filled as the modules of routes are imported."""


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return a reference to a model, which becomes part of the document."""
    _documented[model.__name__] = model
    return {"$ref": _REF.format(model=model.__name__)}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(model)}}}}


COMPLETION_BODY: Final = json_body(CompletionRequest)
CHAT_BODY: Final = json_body(ChatCompletionRequest)

_MEANINGS: Final = {
    400: "Something in the request cannot be served.",
    401: "The server has keys, and the request has none of them.",
    403: "The key lacks the scope; or the server accepts no code, or not in this codec, from this sender.",
    404: "No resource has this id or name.",
    408: "The body did not arrive in time.",
    409: "The state of the job, or an earlier use of the key or name, does not allow it.",
    413: "The body is too large.",
    415: "The file's format is not supported, for example a pickle.",
    416: "The range begins behind the end.",
    422: "A parameter or the JSON has the wrong shape.",
    429: "The queue is full, or the key has used up its quota: send the request again later.",
    500: "The request failed; the server has logged the reason.",
    503: "Starting, draining, full or dead.",
    504: "The request took too long.",
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse, "description": _MEANINGS[status]} for status in statuses}


def event_schema(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": "One event.",
        "properties": {"id": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def json_events(model: type[BaseModel], *, last: str | None = None) -> dict[str, Any]:
    """Return the schema of events; ``last`` ends the stream, which then may have an error before it."""
    content = schema_of(model)
    if last is not None:
        content = {"anyOf": [content, schema_of(ErrorResponse)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
    return event_schema(data if last is None else {"anyOf": [{"const": last}, data]})


JOB_EVENTS: Final = json_events(JobEvent)

GENERATION_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "OpenAI's answer, or its events where `stream` is true.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            EVENTS_TYPE: {"schema": event_schema({"type": "string"})},
        },
    },
    **error_responses(400, 404, 413, 422, 429, 500, 503),
}

BINARY: Final = {"type": "string", "format": "binary"}

TRACE_BODY: Final = {"requestBody": {"required": True, "content": {TRACE_TYPE: {"schema": BINARY}}}}

TRACE_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Frames, see docs/remote.md; what goes wrong from here on is one of them.",
        "content": {FRAMES_TYPE: {"schema": BINARY}},
    },
    **error_responses(400, 403, 404, 413, 429, 500, 503, 504),
}

METRICS_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    },
}


class DocumentedApp(FastAPI):
    """A FastAPI application whose schema includes the models that routes only refer to."""

    def openapi(self) -> dict[str, Any]:
        """Return the document, which is made once: FastAPI's with our schemas, corrections and links."""
        if self.openapi_schema is None:
            schema = super().openapi()
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            for name, model in _documented.items():
                described = model.model_json_schema(ref_template=_REF)
                schemas.update(described.pop("$defs", {}))
                schemas[name] = described
            for operations in schema["paths"].values():
                for operation in operations.values():
                    _correct_operation(operation)
            add_links(schema["paths"])
            for replaced in ("HTTPValidationError", "ValidationError"):
                schemas.pop(replaced, None)
        return super().openapi()


def _documented_error(status: int) -> dict[str, Any]:
    schema = schema_of(ErrorResponse)
    return {"description": _MEANINGS[status], "content": {"application/json": {"schema": schema}}}


def _correct_operation(operation: dict[str, Any]) -> None:
    """Correct FastAPI's own output (error format, null parameters) and add the errors of rejected keys."""
    responses = operation["responses"]
    if "422" in responses:
        responses["422"] = _documented_error(422)
    if operation.get("security"):
        for status in (401, 403, 429):
            responses.setdefault(str(status), _documented_error(status))
    for parameter in operation.get("parameters", []):
        # An omitted header or query parameter is not null, and the text "null" is a string.
        kinds = [kind for kind in parameter["schema"].pop("anyOf", []) if kind != {"type": "null"}]
        parameter["schema"].update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {})


_MAX_PAGE: Final = 100

PageLimit = Annotated[int, Query(ge=1, le=_MAX_PAGE)]
AfterId = Annotated[str | None, Query(max_length=64, description="The last id of the previous page.")]
OfName = Annotated[str | None, Query(pattern=rf"^{NAME_PATTERN}$", description="Only versions of this name.")]
Strict = Annotated[bool, Query(description="Refuse a file that names another model, instead of a warning.")]
