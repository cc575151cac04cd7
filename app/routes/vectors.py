"""``/v1/vectors``: steering vectors stored on the server, which operations use by name."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from api_schemas.vectors import NewVector, TrainingEvent, TrainingRequest, Vector, VectorUpload
from app.catalog.vector_training import train_vector
from app.catalog.vectors import Vectors
from app.http.openapi import Strict, error_responses
from app.routes.catalog import routes_of, upload_body
from app.routes.parameters import Intervener, ServerComponents
from app.routes.training import add_training_route

router: Final = routes_of(
    Vectors.kind,
    "Returns the vector's points, its origin and its training.",
    (
        "Fetch a vector's numbers as a safetensors file",
        "One tensor for each layer, named by its point: `layers.10.output`.",
    ),
)


@router.post(
    "",
    status_code=201,
    summary="Keep a vector",
    openapi_extra=upload_body(NewVector, VectorUpload),
    responses=error_responses(400, 409, 413, 415, 422, 503),
)
async def create_vector(
    request: Request, components: ServerComponents, caller: Intervener, *, strict: Strict = False
) -> Vector:
    """Numbers as JSON, or a file in a form: safetensors, `.npz`, a GGUF control vector, JSON."""
    return await components.vectors.create(request, caller, strict=strict)


add_training_route(
    router,
    Vectors.kind,
    TrainingRequest,
    TrainingEvent,
    train_vector,
    summary="Train a vector from contrasting prompts",
    description="Captures each prompt's residual stream, fits a row for each layer, scores it on held-out "
    "prompts.",
)
