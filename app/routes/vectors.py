"""``/v1/vectors``: steering vectors stored on the server, which operations use by name."""

from __future__ import annotations

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
from app.formats.uploads import FORM_TYPE
from app.http.openapi import (
    BINARY,
    EVENTS_TYPE,
    SAFETENSORS_TYPE,
    AfterId,
    OfName,
    PageLimit,
    Strict,
    error_responses,
    json_body,
    json_events,
    schema_of,
)
from app.routes.context import Asked, Intervener, Served, Trains
from app.routes.training import training_answer

router = APIRouter(prefix="/v1/vectors", tags=["vectors"])

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
async def create_vector(
    request: Request, context: Served, caller: Intervener, *, strict: Strict = False
) -> Vector:
    """Numbers as JSON, or a file in a form: safetensors, `.npz`, a GGUF control vector, JSON."""
    return await context.vectors.create(request, caller, strict=strict)


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
    return await training_answer(
        request,
        context,
        asked,
        caller,
        TrainingRequest,
        context.trainer.train,
        lambda vector: TrainingEvent(type="vector", vector=vector),
    )


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
