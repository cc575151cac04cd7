"""``POST /v1/sweeps``: a grid of interventions in one request."""

from __future__ import annotations

import functools

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.sweeps import Sweep, SweepEvent, SweepRequest
from app.admission.rates import INTERVENING
from app.http.bodies import BodyLimits, read_object
from app.http.errors import validated
from app.http.openapi import EVENTS_TYPE, error_responses, json_body, json_events
from app.routes.parameters import CurrentContext, ServerComponents, Trainer
from app.routes.training import progress_answer, progress_events
from app.services.sweeps.run import run_sweep

router = APIRouter()


@router.post(
    "/v1/sweeps",
    tags=["interventions"],
    summary="Run a grid of interventions, and return one labelled tensor",
    openapi_extra=json_body(SweepRequest),
    responses={
        200: {
            "model": Sweep,
            "description": "The sweep; with `stream` progress events, then the sweep, ended by `[DONE]`.",
            "content": {EVENTS_TYPE: {"schema": json_events(SweepEvent, last="[DONE]")}},
        },
        **error_responses(400, 404, 413, 422, 429, 500, 503),
    },
    response_model=None,
)
async def create_sweep(
    request: Request, components: ServerComponents, context: CurrentContext, caller: Trainer
) -> Response:
    """Patch, ablate, steer or change features at every cell of a grid, and score each by one metric."""
    settings = components.settings
    if context.admitted is not None:
        await context.admitted.check(*INTERVENING)
    limits = BodyLimits(settings.max_body_bytes, settings.upload_idle_timeout_s)
    sweep = validated(SweepRequest, await read_object(request, limits), settings.request_limits).root
    run = functools.partial(run_sweep, components, sweep, request, caller)
    events = None
    if sweep.stream:
        events = progress_events(run, lambda result: SweepEvent(type="sweep", sweep=result))
    return await progress_answer(request, components, context, run, events, 200)
