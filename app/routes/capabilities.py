"""``GET /v1/capabilities``."""

from __future__ import annotations

from fastapi import APIRouter

from api_schemas.capabilities import Capabilities
from app.context import ANY_CALLER, Served
from app.openapi import error_responses

router = APIRouter(tags=["interventions"], dependencies=[ANY_CALLER])


@router.get(
    "/v1/capabilities",
    summary="List the points and operations for interventions",
    responses=error_responses(503),
)
async def get_capabilities(context: Served) -> Capabilities:
    """The points of this model with their shapes, the operations and the limits."""
    return context.engine.capabilities()
