"""``POST /v1/chat/completions``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.context import Completer, Served
from app.openapi import CHAT_BODY, GENERATION_ANSWERS
from app.services.generation import generate

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation, with interventions",
    openapi_extra=CHAT_BODY,
    responses=GENERATION_ANSWERS,
)
async def create_chat_completion(request: Request, context: Served, caller: Completer) -> Response:
    """OpenAI's chat completions, as vLLM serves them, plus the field ``interventions``."""
    return await generate(context, request, caller, context.engine.chat)
