"""``GET /metrics``: metrics in Prometheus' text format; answered in every phase."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from app.context import MONITOR, Served
from app.openapi import METRICS_ANSWERS

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    dependencies=[MONITOR],
    summary="The engine's numbers, in Prometheus' format",
    response_class=Response,
    responses=METRICS_ANSWERS,
)
async def get_metrics(context: Served) -> Response:
    """This server's metrics, listed in docs/monitoring.md, and vLLM's own."""
    return Response(await context.scrape.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
