"""The probes for process supervisors and load balancers: ours, and those of vLLM's server."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from app.context import Served
from app.lifecycle import Phase
from app.openapi import error_responses

router = APIRouter(tags=["health"])


@router.get(
    "/health/live",
    summary="Liveness: whether the process should keep running",
    responses=error_responses(503),
)
async def live(context: Served) -> dict[str, str]:
    """200 from process start, also while the model loads and while draining; 503 once the engine is dead."""
    phase = context.lifecycle.phase
    refusal = context.lifecycle.refusal()
    if phase is Phase.DEAD and refusal is not None:
        raise refusal
    return {"status": phase}


@router.get(
    "/health/ready", summary="Readiness: whether the server accepts requests", responses=error_responses(503)
)
async def ready(context: Served) -> dict[str, str]:
    """200 while requests are served; 503 with the reason otherwise."""
    refusal = context.lifecycle.refusal()
    if refusal is not None:
        raise refusal
    return {"status": context.lifecycle.phase}


@router.get(
    "/health",
    summary="Readiness, as vLLM's server reports it",
    response_class=Response,
    responses=error_responses(503),
)
@router.get(
    "/ping",
    summary="Readiness, as SageMaker asks for it",
    response_class=Response,
    responses=error_responses(503),
)
@router.post("/ping", include_in_schema=False)
async def health(context: Served) -> Response:
    """200 without content while requests are served; 503 with the reason otherwise."""
    await ready(context)
    return Response()
