"""Completions, chat completions and tokens of prompts; and captured tensors that are too large for JSON."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.generation import TokenizeRequest, TokenizeResponse
from app.formats.json_text import json_bytes
from app.http.bodies import BodyLimits, read_object
from app.http.errors import validated
from app.http.openapi import (
    BINARY,
    CHAT_BODY,
    COMPLETION_BODY,
    GENERATION_ANSWERS,
    error_responses,
    json_body,
)
from app.routes.parameters import Completer, Intervener, ServerComponents
from app.services.generation import generate
from app.services.streaming import ClosingStream

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    tags=["openai"],
    summary="Answer a conversation, with interventions",
    openapi_extra=CHAT_BODY,
    responses=GENERATION_ANSWERS,
)
async def create_chat_completion(
    request: Request, components: ServerComponents, caller: Completer
) -> Response:
    """OpenAI's chat completions, as vLLM serves them, plus the field ``interventions``."""
    return await generate(components, request, caller, components.engine.chat)


@router.post(
    "/v1/completions",
    tags=["openai"],
    summary="Complete a prompt, with interventions",
    openapi_extra=COMPLETION_BODY,
    responses=GENERATION_ANSWERS,
)
async def create_completion(request: Request, components: ServerComponents, caller: Completer) -> Response:
    """OpenAI's completions, as vLLM serves them, plus the field ``interventions``."""
    return await generate(components, request, caller, components.engine.completions)


@router.post(
    "/v1/tokenize",
    tags=["interventions"],
    summary="Tokenize a text; interventions count positions in these tokens",
    openapi_extra=json_body(TokenizeRequest),
    responses={
        200: {"model": TokenizeResponse, "description": "The tokens."},
        **error_responses(400, 404, 413, 422, 503),
    },
    response_model=None,
)
async def tokenize(request: Request, components: ServerComponents, caller: Completer) -> Response:
    """A prompt's tokens as `/v1/completions` has them, or a conversation's, rendered up to the answer."""
    del caller  # permission to complete includes permission to tokenize
    settings = components.settings
    limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
    tokenize_request = validated(TokenizeRequest, await read_object(request, limits))
    reply = await components.engine.tokenize(tokenize_request, request)
    return Response(await json_bytes(reply.body), media_type="application/json")


@router.get(
    "/v1/results/{result_id}",
    tags=["interventions"],
    summary="Fetch captured tensors as a safetensors file",
    response_class=Response,
    responses={
        200: {
            "description": "A safetensors file.",
            "content": {"application/safetensors": {"schema": BINARY}},
        },
        **error_responses(404, 429, 503),
    },
)
async def get_result(result_id: str, components: ServerComponents, caller: Intervener) -> Response:
    """The file that a choice's ``interventions.results`` refers to, until it expires."""
    result = await components.store.open(result_id, caller.tenant)
    return ClosingStream(
        result.chunks(),
        media_type="application/safetensors",
        headers={"Content-Length": str(result.num_bytes), "Cache-Control": "private, no-store"},
        on_close=result.close,
        stall_s=components.settings.client_stall_timeout_s,
    )
