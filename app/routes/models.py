"""``GET /v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from app.context import ANY_CALLER, Served
from app.openapi import error_responses

router = APIRouter(tags=["openai"], dependencies=[ANY_CALLER])


@router.get("/v1/models", summary="List the models served", responses=error_responses(503))
async def list_models(context: Served) -> dict[str, Any]:
    """OpenAI's list of models, as vLLM returns it."""
    return await context.engine.models()
