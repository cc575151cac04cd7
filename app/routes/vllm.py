"""The routes of ``app.vllm_routes``: each request is checked here and answered by vLLM's own handler.

The caller is authenticated, the body is read within the limits of all routes, and a tenant's prefix cache is
its own. What the handlers send to the engine passes the engine's own checks, as on every route.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from fastapi import APIRouter, Security
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD
from app.admission.estimates import of_text
from app.body import BodyLimits, read_bytes, read_object
from app.context import Context, Served, caller_of
from app.engine.cache_salts import isolate_cache, salt_of
from app.errors import error_bytes
from app.openapi import error_responses
from app.request_context import context_of
from app.services.passing_on import PassedOn
from app.services.streaming import last_events
from app.vllm_routes import MESSAGES, RESPONSES, VLLM_ROUTES, Body, VLLMRoute

router = APIRouter(tags=["vllm"])

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": one["description"]}  # those of the handlers have vLLM's form
    for status, one in error_responses(400, 401, 403, 404, 413, 422, 429, 503, 504).items()
}
_TEXTS: Final = ("input", "documents", "text_1", "text_2", "data_1", "data_2", "items", "queries")
"""Fields that may be lists of texts, each of which is a request to the engine."""


def _endpoint(route: VLLMRoute) -> Callable[..., Awaitable[Response]]:
    async def passed_on(request: Request, context: Served) -> Response:
        app = context.engine.vllm_app()
        if app is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"This engine has no route {route.path}.")
        is_anthropic = route.path.startswith(MESSAGES)
        return PassedOn(
            app,
            await _body(route, request, context),
            stall_s=context.settings.client_stall_timeout_s,
            final_event=_anthropic_error if is_anthropic else last_events,
        )

    return passed_on


async def _body(route: VLLMRoute, request: Request, context: Context) -> bytes:
    """Return the body that is passed on; raises ApiError if it is not accepted."""
    settings, asked = context.settings, context_of(request.scope)
    if route.body is Body.NONE:
        return b""
    if route.body is Body.UPLOAD:
        return bytes(await read_bytes(request, settings.max_body_bytes, settings.upload_idle_timeout_s))
    limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
    fields = await read_object(request, limits)
    _check(route, fields, settings.max_choices)
    if route.works:
        asked.record.note_operations(fields.get("model"), ())
        asked.record.salt = salt_of(fields, asked.caller)
        isolate_cache(fields, asked.caller)
    data = json.dumps(fields).encode()
    if route.works and asked.admitted is not None:
        await asked.admitted.reserve(of_text(len(data), fields))
    return data


def _check(route: VLLMRoute, fields: Mapping[str, Any], max_texts: int) -> None:
    """Refuse interventions, which these routes do not have yet, and too many texts; raises ApiError."""
    if fields.get(FIELD):
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            f"{route.path} takes no `{FIELD}` yet; send them to /v1/completions or /v1/chat/completions.",
            FIELD,
        )
    if not route.works or route.path in {RESPONSES, MESSAGES}:
        return
    for name in _TEXTS:
        given = fields.get(name)
        if isinstance(given, list) and len(given) > max_texts and not isinstance(given[0], int):
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A request may have {max_texts} texts, got {len(given)}; send several "
                "(NNSIGHT_ENGINE_MAX_CHOICES).",
                name,
            )


def _anthropic_error(error: ApiError) -> bytes:
    """Return an error as the last event of Anthropic's streams."""
    found = json.loads(error_bytes(error))["error"]
    body = {"type": "error", "error": {"type": found["type"], "message": found["message"]}}
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()


def _documented(route: VLLMRoute) -> dict[str, Any] | None:
    """Return the documentation of a route's body; its fields are vLLM's."""
    if route.body is Body.NONE:
        return None
    media_type = "application/json" if route.body is Body.JSON else "multipart/form-data"
    return {"requestBody": {"required": True, "content": {media_type: {"schema": {"type": "object"}}}}}


for _route in VLLM_ROUTES:
    router.add_api_route(
        _route.path,
        _endpoint(_route),
        methods=[_route.method],
        summary=f"vLLM's route: {_route.summary}",
        response_model=None,
        openapi_extra=_documented(_route),
        responses=_ERRORS,
        dependencies=[Security(caller_of, scopes=[] if _route.scope is None else [_route.scope])],
        name=f"{_route.method} {_route.path}",
    )
