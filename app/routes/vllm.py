"""The routes of ``app.http.vllm_routes``: each request is checked here and answered by vLLM's own handler.

The caller is authenticated, the body is read within the limits of all routes, and a tenant's prefix cache is
its own. What the handlers send to the engine passes the engine's own checks, as on every route.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import APIRouter, Security
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.generation import (
    EmbeddingsRequest,
    EmbeddingsResponse,
    MessagesRequest,
    MessagesResponse,
    ResponsesRequest,
    ResponsesResponse,
)
from api_schemas.interventions import FIELD, Intervention
from app.admission.estimates import of_text
from app.components import Components
from app.engine.client import JsonObject
from app.formats.json_bodies import num_media_characters
from app.formats.json_text import encoded_json
from app.http.bodies import BodyLimits, read_object
from app.http.contexts import context_of
from app.http.errors import error_fields, message_error_bytes
from app.http.openapi import EVENTS_TYPE, error_responses, event_schema, json_body, schema_of
from app.http.vllm_routes import (
    EMBEDDINGS,
    LOAD_ADAPTER,
    MESSAGES,
    RESPONSES,
    STORED_RESPONSE,
    UNLOAD_ADAPTER,
    VLLM_ROUTES,
    VLLMRoute,
)
from app.routes.parameters import ServerComponents, caller_of
from app.services.operations import drop_presets, isolate, take_operations, with_values
from app.services.passing_on import PassedOn, check_body, check_in_background, is_in_background, num_texts
from app.services.streaming import last_events

router = APIRouter(tags=["vllm"])

_FALSE: Final = {"false", "0"}
_SEQUENCE_NUMBER: Final = re.compile(rb'"sequence_number": ?(\d+)')
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": response["description"]}  # those of the handlers have vLLM's form
    for status, response in error_responses(400, 401, 403, 404, 413, 422, 429, 503, 504).items()
}


def _endpoint(route: VLLMRoute) -> Callable[..., Awaitable[Response]]:
    """Return the handler of a route, which has vLLM's own handler answer the request."""

    async def passed_on(request: Request, components: ServerComponents) -> Response:
        body, streams, in_background = b"", False, False
        operations: tuple[Intervention, ...] = ()
        if route.path == STORED_RESPONSE:
            _check_whole(request)
        if route.has_body:
            fields = await _read_fields(route, request, components)
            streams = bool(fields.get("stream"))
            in_background = is_in_background(route, fields)
            if route.runs:
                operations, body = await _operations_and_body(route, fields, request, components)
            else:
                body = await encoded_json(fields)
        return PassedOn(
            await components.engine.vllm_app(
                operations, request, streams=streams, in_background=in_background
            ),
            body,
            stall_s=components.settings.client_stall_timeout_s,
            final_event=_last_events_of(route.path),
            keep_alive_s=components.settings.sse_keep_alive_s,
        )

    return passed_on


def _check_whole(request: Request) -> None:
    """Check that a stored response is read whole; raises ApiError if its events are asked for."""
    if request.query_params.get("stream", "false").lower() not in _FALSE:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "Events of stored responses are not kept: read it without `stream`.",
            "stream",
        )


async def _read_fields(route: VLLMRoute, request: Request, components: Components) -> JsonObject:
    """Read and check a body; raises ApiError. ``MODEL:PRESET`` loses the preset where no model runs."""
    settings = components.settings
    limits = BodyLimits(settings.max_body_bytes, settings.upload_idle_timeout_s)
    fields = await read_object(request, limits)
    max_model_len = components.engine.capabilities().sizes.max_model_len
    check_body(route, fields, max_model_len, settings.bounds.max_choices)
    if not route.runs:
        drop_presets(fields, components.engine.served())
    components.engine.check_passed_body(route.path, fields)
    if route.path in {LOAD_ADAPTER, UNLOAD_ADAPTER}:
        context_of(request.scope).record.subject = clip(str(fields.get("lora_name", "")))
    return fields


async def _operations_and_body(
    route: VLLMRoute, fields: JsonObject, request: Request, components: Components
) -> tuple[tuple[Intervention, ...], bytes]:
    """Return a request's interventions, and its body without them; raises ApiError if it is not accepted."""
    context = context_of(request.scope)
    count = num_texts(fields) if route.has_many else 1
    operations = await take_operations(fields, count, request, components, context.caller)
    if is_in_background(route, fields):
        check_in_background(fields, has_operations=bool(operations))
    if operations and not route.intervenes:
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION, f"{route.path} takes no `{FIELD}`, and so no preset.", FIELD
        )
    isolate(operations, fields, request, context.caller)
    body = await encoded_json(fields)
    if context.admitted is not None:
        await context.admitted.reserve(of_text(len(body) - num_media_characters(fields), fields))
    return await with_values(operations, request, components, context.caller), body


def _last_events_of(path: str) -> Callable[[ApiError, bytes], bytes]:
    """Return the function that makes an error the last events of a route's stream, in the form of its API."""
    by_prefix = {MESSAGES: _message_error, RESPONSES: _response_error}
    return next(
        (
            last_events_of_error
            for prefix, last_events_of_error in by_prefix.items()
            if path.startswith(prefix)
        ),
        _openai_error,
    )


def _openai_error(error: ApiError, _last_sent: bytes) -> bytes:
    return last_events(error)


def _message_error(error: ApiError, _last_sent: bytes) -> bytes:
    return _error_event(message_error_bytes(error))


def _response_error(error: ApiError, last_sent: bytes) -> bytes:
    """Return an error as the last event of a response, with the sequence number after the last one sent."""
    fields, numbers = error_fields(error), _SEQUENCE_NUMBER.findall(last_sent)
    body = {"type": "error", "sequence_number": int(numbers[-1]) + 1 if numbers else 0}
    body |= {name: fields[name] for name in ("code", "message", "param")}
    return _error_event(json.dumps(body).encode())


def _error_event(data: bytes) -> bytes:
    return b"event: error\ndata: %s\n\n" % data


_BODY: Final = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}
"""The documentation of a body; its fields are vLLM's."""
_MODELS: Final[dict[str, tuple[type[BaseModel], type[BaseModel]]]] = {
    RESPONSES: (ResponsesRequest, ResponsesResponse),
    MESSAGES: (MessagesRequest, MessagesResponse),
    **dict.fromkeys(EMBEDDINGS, (EmbeddingsRequest, EmbeddingsResponse)),
}
"""The documented forms of bodies and answers with interventions."""


def _documentation(route: VLLMRoute) -> dict[str, Any] | None:
    """Return what the OpenAPI document has of a route's body and answer; None for one without a body."""
    models = _MODELS.get(route.path)
    if models is None:
        return _BODY if route.has_body else None
    request_model, answer_model = models
    contents = {
        "application/json": {"schema": schema_of(answer_model)},
        EVENTS_TYPE: {"schema": event_schema({"type": "string"})},
    }
    answer = {"description": "The answer, or its events where `stream` is true.", "content": contents}
    return json_body(request_model) | {"responses": {"200": answer}}


for _route in VLLM_ROUTES:
    router.add_api_route(
        _route.path,
        _endpoint(_route),
        methods=[_route.method],
        summary=f"vLLM's route: {_route.summary}",
        response_model=None,
        openapi_extra=_documentation(_route),
        responses=_ERRORS,
        dependencies=[Security(caller_of, scopes=[] if _route.scope is None else [_route.scope])],
        name=f"{_route.method} {_route.path}",
    )
