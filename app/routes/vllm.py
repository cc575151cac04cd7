"""The routes of ``app.vllm_routes``: each request is checked here and answered by vLLM's own handler.

The caller is authenticated, the body is read within the limits of all routes, and a tenant's prefix cache is
its own. What the handlers send to the engine passes the engine's own checks, as on every route.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import APIRouter, Security
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.errors import ApiError
from app.admission.estimates import of_text
from app.body import BodyLimits, read_object
from app.context import Context, Served, caller_of
from app.engine.cache_salts import isolate_cache, salt_of
from app.errors import error_bytes
from app.openapi import error_responses
from app.request_context import context_of
from app.services.passed_bodies import check_body
from app.services.passing_on import PassedOn
from app.services.streaming import last_events
from app.vllm_routes import MESSAGES, VLLM_ROUTES, VLLMRoute

router = APIRouter(tags=["vllm"])

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": one["description"]}  # those of the handlers have vLLM's form
    for status, one in error_responses(400, 401, 403, 404, 413, 422, 429, 503, 504).items()
}


def _endpoint(route: VLLMRoute) -> Callable[..., Awaitable[Response]]:
    async def passed_on(request: Request, context: Served) -> Response:
        is_anthropic = route.path.startswith(MESSAGES)
        return PassedOn(
            context.engine.vllm_app(),
            await _body(route, request, context) if route.has_body else b"",
            stall_s=context.settings.client_stall_timeout_s,
            final_event=_anthropic_error if is_anthropic else last_events,
        )

    return passed_on


async def _body(route: VLLMRoute, request: Request, context: Context) -> bytes:
    """Return the body that is passed on; raises ApiError if it is not accepted."""
    settings, asked = context.settings, context_of(request.scope)
    limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
    fields = await read_object(request, limits)
    check_body(route, fields, context.engine.capabilities().sizes.max_model_len)
    context.engine.check_passed_body(route.path, fields)
    if route.generates:
        asked.record.note_operations(fields.get("model"), ())
        asked.record.salt = salt_of(fields, asked.caller)
        isolate_cache(fields, asked.caller)
    data = json.dumps(fields).encode()
    if route.generates and asked.admitted is not None:
        await asked.admitted.reserve(of_text(len(data), fields))
    return data


def _anthropic_error(error: ApiError) -> bytes:
    """Return an error as the last event of Anthropic's streams."""
    found = json.loads(error_bytes(error))["error"]
    body = {"type": "error", "error": {"type": found["type"], "message": found["message"]}}
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()


_BODY: Final = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
}
"""The documentation of a body; its fields are vLLM's."""

for _route in VLLM_ROUTES:
    router.add_api_route(
        _route.path,
        _endpoint(_route),
        methods=[_route.method],
        summary=f"vLLM's route: {_route.summary}",
        response_model=None,
        openapi_extra=_BODY if _route.has_body else None,
        responses=_ERRORS,
        dependencies=[Security(caller_of, scopes=[] if _route.scope is None else [_route.scope])],
        name=f"{_route.method} {_route.path}",
    )
