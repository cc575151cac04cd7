"""``GET /v1/status``: how the server is, for people and clients; answered in every phase."""

from __future__ import annotations

import platform

from fastapi import APIRouter

from api_schemas.traces import ModelStatus, ServerStatus
from app.context import ANYBODY, Served
from app.lifecycle import Phase
from nnsight_engine import __version__

router = APIRouter(tags=["health"], dependencies=[ANYBODY])


@router.get("/v1/status", summary="How the server is, and what it has")
async def get_status(context: Served) -> ServerStatus:
    """The phase, the models and what runs traces of them; 200 in every phase."""
    phase, served = context.lifecycle.phase, context.engine.served()
    model = ModelStatus(
        name=served.names[0],
        names=list(served.names),
        running=phase is Phase.READY,
        engines=context.traces.names,
    )
    return ServerStatus(
        phase=phase,
        version=__version__,
        python=platform.python_version(),
        models=[model],
        in_flight=context.lifecycle.num_in_flight,
        queued=await context.jobs.num_waiting() + sum(one.num_waiting for one in context.processes),
    )
