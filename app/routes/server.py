"""The server's probes (ours, and those of vLLM's server), status, metrics, models and capabilities.

Probes, status and metrics are answered in every phase.
"""

from __future__ import annotations

import platform
from typing import Any

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from api_schemas.administration import Scope
from api_schemas.server import Capabilities, ModelStatus, ServerStatus
from app.auth.principal import Principal
from app.components import Components
from app.engine.served_model import model_of
from app.http.lifecycle import Phase
from app.http.openapi import METRICS_ANSWERS, error_responses
from app.routes.parameters import ANY_CALLER, MONITOR, Caller, ServerComponents
from app.services.operations import add_presets
from nnsight_engine import __version__

router = APIRouter()


@router.get(
    "/health/live",
    tags=["health"],
    summary="Liveness: whether the process should keep running",
    responses=error_responses(503),
)
async def live(components: ServerComponents) -> dict[str, str]:
    """200 from process start, also while the model loads and while draining; 503 once the engine is dead."""
    phase = components.lifecycle.phase
    refusal = components.lifecycle.refusal()
    if phase is Phase.DEAD and refusal is not None:
        raise refusal
    return {"status": phase}


@router.get(
    "/health/ready",
    tags=["health"],
    summary="Readiness: whether the server accepts requests",
    responses=error_responses(503),
)
async def ready(components: ServerComponents) -> dict[str, str]:
    """200 while requests are served; 503 with the reason otherwise."""
    refusal = components.lifecycle.refusal()
    if refusal is not None:
        raise refusal
    return {"status": components.lifecycle.phase}


@router.get(
    "/health",
    tags=["health"],
    summary="Readiness, as vLLM's server reports it",
    response_class=Response,
    responses=error_responses(503),
)
@router.get(
    "/ping",
    tags=["health"],
    summary="Readiness, as SageMaker asks for it",
    response_class=Response,
    responses=error_responses(503),
)
@router.post("/ping", tags=["health"], include_in_schema=False)
async def health(components: ServerComponents) -> Response:
    """200 without content while requests are served; 503 with the reason otherwise."""
    await ready(components)
    return Response()


@router.get("/v1/status", tags=["health"], summary="Server status and models")
async def get_status(components: ServerComponents, caller: Caller) -> ServerStatus:
    """Returns the phase, the models, their trace engines, and the caller's running and queued requests."""
    phase, served = components.lifecycle.phase, components.engine.served()
    model = ModelStatus(
        name=served.names[0],
        names=list(served.all_names),
        fingerprint=served.fingerprint,
        running=phase is Phase.READY,
        engines=components.traces.names,
    )
    in_flight, queued = await _running_and_queued(components, caller)
    return ServerStatus(
        phase=phase,
        version=__version__,
        python=platform.python_version(),
        models=[model],
        in_flight=in_flight,
        queued=queued,
    )


async def _running_and_queued(components: Components, caller: Principal) -> tuple[int, int]:
    """Return the running and queued requests: a tenant's own; all for administrators or without keys."""
    if not caller.has_key or Scope.ADMIN in caller.scopes:
        waiting = sum(engine.num_waiting for engine in components.processes)
        return components.lifecycle.num_in_flight, await components.jobs.num_waiting() + waiting
    tenant = caller.tenant
    running = components.rates.num_running(tenant) + components.jobs.runner.num_running(tenant)
    waiting = sum(engine.num_waiting_of(tenant) for engine in components.processes)
    return running, await components.jobs.num_waiting(tenant) + waiting


@router.get(
    "/metrics",
    tags=["health"],
    dependencies=[MONITOR],
    summary="The engine's numbers, in Prometheus' format",
    response_class=Response,
    responses=METRICS_ANSWERS,
)
async def get_metrics(components: ServerComponents) -> Response:
    """This server's metrics, listed in docs/monitoring.md, and vLLM's own."""
    return Response(await components.scrape.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/v1/models", tags=["openai"], summary="List the models served", responses=error_responses(503))
async def list_models(components: ServerComponents, caller: Caller) -> dict[str, Any]:
    """OpenAI's list of models, as vLLM returns it, and those that name a preset of the caller's."""
    return await add_presets(await components.engine.models(), components.presets, caller)


@router.get(
    "/v1/models/{model:path}",
    tags=["openai"],
    summary="A model of the list",
    responses=error_responses(404, 503),
)
async def get_model(model: str, components: ServerComponents, caller: Caller) -> dict[str, Any]:
    """OpenAI's object for a model, as the list has it; of an organisation, too, ``org/model``."""
    listed = await list_models(components, caller)
    return model_of(listed, model) if model else listed  # `/v1/models/` is the list


@router.get(
    "/v1/capabilities",
    tags=["interventions"],
    dependencies=[ANY_CALLER],
    summary="List the points and operations for interventions",
    responses=error_responses(503),
)
async def get_capabilities(components: ServerComponents) -> Capabilities:
    """The points of this model with their shapes, the operations and the limits."""
    return components.engine.capabilities()
