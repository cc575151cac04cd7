"""``GET /v1/status``: the server's state, for people and clients; answered in every phase."""

from __future__ import annotations

import platform

from fastapi import APIRouter

from api_schemas.keys import Scope
from api_schemas.traces import ModelStatus, ServerStatus
from app.auth.principal import Principal
from app.context import Caller, Context, Served
from app.lifecycle import Phase
from nnsight_engine import __version__

router = APIRouter(tags=["health"])


@router.get("/v1/status", summary="Server status and models")
async def get_status(context: Served, caller: Caller) -> ServerStatus:
    """Returns the phase, the models, their trace engines, and the caller's running and queued requests."""
    phase, served = context.lifecycle.phase, context.engine.served()
    model = ModelStatus(
        name=served.names[0],
        names=list(served.all_names),
        fingerprint=served.fingerprint,
        running=phase is Phase.READY,
        engines=context.traces.names,
    )
    in_flight, queued = await _counts(context, caller)
    return ServerStatus(
        phase=phase,
        version=__version__,
        python=platform.python_version(),
        models=[model],
        in_flight=in_flight,
        queued=queued,
    )


async def _counts(context: Context, caller: Principal) -> tuple[int, int]:
    """Return the running and queued requests: a tenant's own; all for administrators or without keys."""
    if not caller.has_key or Scope.ADMIN in caller.scopes:
        waiting = sum(one.num_waiting for one in context.processes)
        return context.lifecycle.num_in_flight, await context.jobs.num_waiting() + waiting
    tenant = caller.tenant
    running = context.rates.num_running(tenant) + context.jobs.num_running_of(tenant)
    waiting = sum(one.num_waiting_of(tenant) for one in context.processes)
    return running, await context.jobs.num_waiting(tenant) + waiting
