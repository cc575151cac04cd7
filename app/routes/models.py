"""``GET /v1/models``, and one model of it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from app.context import Caller, Served
from app.openapi import error_responses
from app.services.model_list import model_of

router = APIRouter(tags=["openai"])


@router.get("/v1/models", summary="List the models served", responses=error_responses(503))
async def list_models(context: Served, caller: Caller) -> dict[str, Any]:
    """OpenAI's list of models, as vLLM returns it, and those that name a preset of the caller's."""
    return await context.presets.add_models(await context.engine.models(), caller)


@router.get("/v1/models/{model:path}", summary="A model of the list", responses=error_responses(404, 503))
async def get_model(model: str, context: Served, caller: Caller) -> dict[str, Any]:
    """OpenAI's object for a model, as the list has it; of an organisation, too, ``org/model``."""
    listed = await list_models(context, caller)
    return model_of(listed, model) if model else listed  # `/v1/models/` is the list
