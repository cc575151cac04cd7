"""``POST /v1/tokenize``."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.tokens import TokenizeRequest, TokenizeResponse
from app.body import BodyLimits, read_object
from app.context import Completer, Served
from app.errors import validated
from app.json_text import json_bytes
from app.openapi import error_responses, json_body

router = APIRouter(tags=["interventions"])


@router.post(
    "/v1/tokenize",
    summary="Tokenize a text; interventions count positions in these tokens",
    openapi_extra=json_body(TokenizeRequest),
    responses={
        200: {"model": TokenizeResponse, "description": "The tokens."},
        **error_responses(400, 404, 413, 422, 503),
    },
    response_model=None,
)
async def tokenize(request: Request, context: Served, caller: Completer) -> Response:
    """A prompt's tokens as `/v1/completions` has them, or a conversation's, rendered up to the answer."""
    del caller  # permission to complete includes permission to tokenize
    settings = context.settings
    limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
    wanted = validated(TokenizeRequest, await read_object(request, limits))
    reply = await context.engine.tokenize(wanted, request)
    return Response(await json_bytes(reply.body), headers=reply.headers, media_type="application/json")
