"""``/v1/vectors``, ``/v1/detectors``, ``/v1/presets``: things on the server, which requests use by name."""

from __future__ import annotations

from typing import Any, Final

from fastapi import Response
from starlette.requests import Request

from api_schemas.detectors import Detector, DetectorUpload, NewDetector
from api_schemas.presets import NewPreset, PresetContent
from api_schemas.training import DetectorTrainingEvent, DetectorTrainingRequest
from api_schemas.vectors import NewVector, TrainingEvent, TrainingRequest, Vector, VectorUpload
from app.catalog.detectors import Detectors, train_detector
from app.catalog.presets import Presets
from app.catalog.vectors import Vectors, train_vector
from app.http.openapi import Strict, error_responses, json_body
from app.routes.catalog import list_of, routes_of, upload_body
from app.routes.parameters import CurrentContext, Intervener, ServerComponents
from app.routes.training import add_training_route

vectors_router: Final = routes_of(
    Vectors.kind,
    "Returns the vector's points, its origin and its training.",
    (
        "Fetch a vector's numbers as a safetensors file",
        "One tensor for each layer, named by its point: `layers.10.output`.",
    ),
)


@vectors_router.post(
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
    vectors_router,
    Vectors.kind,
    TrainingRequest,
    TrainingEvent,
    train_vector,
    summary="Train a vector from contrasting prompts",
    description="Captures each prompt's residual stream, fits a row for each layer, scores it on held-out "
    "prompts.",
)


detectors_router: Final = routes_of(
    Detectors.kind,
    "Returns the detector's parts, its calibration, its origin and its training.",
    (
        "Fetch a detector as a safetensors file",
        "Tensors `parts.N.weights` and so on, and the head as JSON in the metadata `detector`.",
    ),
)


@detectors_router.post(
    "",
    status_code=201,
    summary="Keep a detector",
    openapi_extra=upload_body(NewDetector, DetectorUpload),
    responses=error_responses(400, 409, 413, 415, 422, 503),
)
async def create_detector(request: Request, components: ServerComponents, caller: Intervener) -> Detector:
    """Head and numbers as JSON, or a safetensors file in a form."""
    return await components.detectors.create(request, caller)


add_training_route(
    detectors_router,
    Detectors.kind,
    DetectorTrainingRequest,
    DetectorTrainingEvent,
    train_detector,
    summary="Train a detector from labelled prompts",
    description="Captures each prompt's residual stream, fits a detector, calibrates it on held-out prompts.",
)


presets_router: Final = list_of(Presets.kind)

_MADE: Final[dict[int | str, dict[str, Any]]] = error_responses(400, 403, 404, 409, 413, 422, 503)


@presets_router.post(
    "",
    status_code=201,
    summary="Keep a preset",
    openapi_extra=json_body(NewPreset),
    responses=_MADE,
)
async def create_preset(
    request: Request, components: ServerComponents, context: CurrentContext, caller: Intervener
) -> PresetContent:
    """The next version of its name."""
    preset, _ = await components.presets.create(request, caller)
    context.record.subject = str(preset.reference)
    return preset


@presets_router.put(
    "",
    status_code=201,
    summary="Keep a preset, unless its newest version is the same",
    openapi_extra=json_body(NewPreset),
    responses={
        200: {"model": PresetContent, "description": "The newest version, which is the same."},
        **_MADE,
    },
)
async def put_preset(
    request: Request,
    response: Response,
    components: ServerComponents,
    context: CurrentContext,
    caller: Intervener,
) -> PresetContent:
    """The next version of its name; none if operations, description and sharing are those of the newest."""
    preset, is_new = await components.presets.create(request, caller, unless_same=True)
    response.status_code = 201 if is_new else 200
    context.record.subject = str(preset.reference)
    return preset


@presets_router.get("/{preset}", summary="Describe a preset", responses=error_responses(404, 503))
async def get_preset(preset: str, components: ServerComponents, caller: Intervener) -> PresetContent:
    """`calm` is the newest version, `calm@3` a specific one. Returns its operations too."""
    return await components.presets.get(preset, caller.tenant)


@presets_router.delete(
    "/{preset}", status_code=204, summary="Remove a preset", responses=error_responses(404, 503)
)
async def delete_preset(
    preset: str, components: ServerComponents, context: CurrentContext, caller: Intervener
) -> None:
    """One version, the newest of a name alone; its number is not reused. Shared ones need `admin`."""
    removed = await components.presets.remove(preset, caller)
    context.record.subject = f"{removed.name}@{removed.version}"
