"""``GET /v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from app.context import Caller, Served
from app.openapi import error_responses

router = APIRouter(tags=["openai"])


@router.get("/v1/models", summary="List the models served", responses=error_responses(503))
async def list_models(context: Served, caller: Caller) -> dict[str, Any]:
    """OpenAI's list of models, as vLLM returns it, and those that name a preset of the caller's."""
    return await context.presets.add_models(await context.engine.models(), caller)
