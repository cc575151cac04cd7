"""``GET /v1/capabilities``."""

from __future__ import annotations

from fastapi import APIRouter

from api_schemas.capabilities import Capabilities
from app.context import Served

router = APIRouter(tags=["interventions"])


@router.get("/v1/capabilities", summary="What this model offers to interventions")
async def get_capabilities(context: Served) -> Capabilities:
    """The points of this model with their shapes, the operations, the limits."""
    return context.engine.capabilities()
