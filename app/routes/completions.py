"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.context import Completer, Served
from app.openapi import COMPLETION_BODY, GENERATION_ANSWERS
from app.services.generation import generate

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/completions",
    summary="Complete a prompt, with interventions",
    openapi_extra=COMPLETION_BODY,
    responses=GENERATION_ANSWERS,
)
async def create_completion(request: Request, context: Served, caller: Completer) -> Response:
    """OpenAI's completions, as vLLM serves them, plus the field ``interventions``."""
    return await generate(context, request, caller, context.engine.completions)
