"""``POST /v1/traces``: runs a client's blocks; ``GET /v1/traces/outline``: the modules that they may name."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.server import TraceOutline
from app.http.openapi import TRACE_ANSWERS, TRACE_BODY, error_responses
from app.routes.parameters import CODER, Coder, ServerComponents
from app.services.traces import answer_trace, model_outline

router = APIRouter(prefix="/v1/traces", tags=["traces"])


@router.post(
    "",
    summary="Run a trace and return its events and result",
    response_class=Response,
    openapi_extra=TRACE_BODY,
    responses=TRACE_ANSWERS,
)
async def run_trace(request: Request, components: ServerComponents, caller: Coder) -> Response:
    """The body contains blocks; the response is a stream of frames: events, outputs, and the saved values."""
    return await answer_trace(components, request, caller)


@router.get(
    "/outline",
    dependencies=[CODER],
    summary="List the model's modules, for clients that write blocks without loading the model",
    responses=error_responses(503),
)
async def get_outline(components: ServerComponents) -> TraceOutline:
    """The modules as vLLM has them, with their paths, and the standard points."""
    return await model_outline(components.engine, components.traces.names)
