"""``GET /v1/results/{id}``: captured tensors that are too large for the JSON answer."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from app.context import Intervener, Served
from app.openapi import BINARY, error_responses
from app.services.streaming import ClosingStream

router = APIRouter(tags=["interventions"])


@router.get(
    "/v1/results/{result_id}",
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
async def get_result(result_id: str, context: Served, caller: Intervener) -> Response:
    """The file that a choice's ``interventions.results`` refers to, until it expires."""
    result = await context.store.open(result_id, caller.tenant)
    return ClosingStream(
        result.chunks(),
        media_type="application/safetensors",
        headers={"Content-Length": str(result.num_bytes), "Cache-Control": "private, no-store"},
        on_close=result.close,
        stall_s=context.settings.client_stall_timeout_s,
    )
