"""``/v1/vectors``: steering vectors stored on the server, which operations use by name."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.vectors import (
    NewVector,
    TrainingEvent,
    TrainingRequest,
    Vector,
    VectorList,
    VectorUpload,
)
from app.admission.estimates import of_training
from app.admission.quotas import INTERVENING
from app.body import BodyLimits, read_object
from app.context import Asked, Intervener, Served, Trains
from app.disconnect import while_connected
from app.errors import validated
from app.openapi import BINARY, EVENTS_TYPE, error_responses, json_body, json_events, schema_of
from app.routes.paging import AfterId, OfName, PageLimit
from app.services.keep_alive import COMMENT, Begun, LateStream, within
from app.services.streaming import ClosingStream, events, first_event, last_events
from app.vectors.training import training_events
from app.vectors.uploads import FORM_TYPE

router = APIRouter(prefix="/v1/vectors", tags=["vectors"])

SAFETENSORS_TYPE: Final = "application/safetensors"

TRAINING_EVENTS: Final = json_events(TrainingEvent, last="[DONE]")

_BODY: Final = json_body(NewVector)
_BODY["requestBody"]["content"][FORM_TYPE] = {"schema": schema_of(VectorUpload)}


@router.post(
    "",
    status_code=201,
    summary="Keep a vector",
    openapi_extra=_BODY,
    responses=error_responses(400, 409, 413, 415, 422, 503),
)
async def create_vector(request: Request, context: Served, caller: Intervener) -> Vector:
    """Numbers as JSON, or a file in a form: safetensors, `.npz`, a GGUF control vector, JSON."""
    return await context.vectors.create(request, caller)


@router.post(
    "/train",
    status_code=201,
    summary="Train a vector from contrasting prompts",
    openapi_extra=json_body(TrainingRequest),
    responses={
        200: {
            "description": "With `stream`: progress events, then the vector; ends with `[DONE]`.",
            "content": {EVENTS_TYPE: {"schema": TRAINING_EVENTS}},
        },
        201: {"model": Vector, "description": "The vector."},
        **error_responses(400, 404, 409, 413, 422, 429, 500, 503),
    },
    response_model=None,
)
async def train_vector(request: Request, context: Served, asked: Asked, caller: Trains) -> Response:
    """Captures each prompt's residual stream, fits a row for each layer, scores it on held-out prompts."""
    settings = context.settings
    admitted, deadline = asked.admitted, asked.deadline
    if admitted is not None:
        await admitted.check(*INTERVENING)
    limits = BodyLimits(settings.max_body_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
    wanted = validated(TrainingRequest, await read_object(request, limits))
    if admitted is not None:
        await admitted.reserve(of_training(wanted))
    train = functools.partial(context.trainer.train, wanted, request, caller)
    if not wanted.stream:
        vector = await while_connected(request.receive, train(lambda _: None), deadline)
        return Response(vector.model_dump_json(), 201, media_type="application/json")
    source = training_events(train)
    # An error before the first event gets its own HTTP status, unless the training waits for long.
    begun = await while_connected(
        request.receive, within(_begun(source), settings.sse_keep_alive_s), deadline
    )
    stream = LateStream(begun) if isinstance(begun, asyncio.Task) else source
    return ClosingStream(
        events(COMMENT if isinstance(begun, asyncio.Task) else begun.first, stream, asked),
        media_type=EVENTS_TYPE,
        on_close=stream.aclose,
        stall_s=settings.client_stall_timeout_s,
        final_event=last_events,
        keep_alive_s=settings.sse_keep_alive_s,
    )


async def _begun(source: AsyncIterator[str]) -> Begun:
    return Begun(await first_event(source), source)


@router.get("", summary="List vectors, the newest first", responses=error_responses(404, 503))
async def list_vectors(
    context: Served,
    caller: Intervener,
    limit: PageLimit = 20,
    after: AfterId = None,
    name: OfName = None,
) -> VectorList:
    """The caller's own vectors and shared ones; pass a page's `last_id` as `after` for the next."""
    return await context.vectors.page(caller.tenant, name=name, after=after, limit=limit)


@router.get("/{vector_id}", summary="Describe a vector", responses=error_responses(404, 503))
async def get_vector(vector_id: str, context: Served, caller: Intervener) -> Vector:
    """Returns the vector's points, its origin and its training."""
    return await context.vectors.get(vector_id, caller.tenant)


@router.get(
    "/{vector_id}/content",
    summary="Fetch a vector's numbers as a safetensors file",
    response_class=Response,
    responses={
        200: {"description": "A safetensors file.", "content": {SAFETENSORS_TYPE: {"schema": BINARY}}},
        **error_responses(404, 503),
    },
)
async def get_vector_content(vector_id: str, context: Served, caller: Intervener) -> Response:
    """One tensor for each layer, named by its point: `layers.10.output`."""
    content = await context.vectors.content(vector_id, caller.tenant)
    return Response(content, media_type=SAFETENSORS_TYPE, headers={"Cache-Control": "private, no-store"})


@router.delete(
    "/{vector_id}", status_code=204, summary="Remove a vector", responses=error_responses(404, 503)
)
async def delete_vector(vector_id: str, context: Served, caller: Intervener) -> None:
    """Running requests go on; the version number is not reused. Shared ones need the scope `admin`."""
    await context.vectors.remove(vector_id, caller)
