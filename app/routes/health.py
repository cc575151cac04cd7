"""``GET /health/live`` and ``GET /health/ready``: the probes for process supervisors and load balancers."""

from __future__ import annotations

from fastapi import APIRouter

from app.context import Served
from app.lifecycle import Phase
from app.openapi import error_responses

router = APIRouter(prefix="/health", tags=["health"])


@router.get(
    "/live", summary="Liveness: whether the process should keep running", responses=error_responses(503)
)
async def live(context: Served) -> dict[str, str]:
    """200 from process start, also while the model loads and while draining; 503 once the engine is dead."""
    phase = context.lifecycle.phase
    refusal = context.lifecycle.refusal()
    if phase is Phase.DEAD and refusal is not None:
        raise refusal
    return {"status": phase}


@router.get(
    "/ready", summary="Readiness: whether the server accepts requests", responses=error_responses(503)
)
async def ready(context: Served) -> dict[str, str]:
    """200 while requests are served; 503 with the reason otherwise."""
    refusal = context.lifecycle.refusal()
    if refusal is not None:
        raise refusal
    return {"status": context.lifecycle.phase}
