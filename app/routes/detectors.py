"""``/v1/detectors``: detectors stored on the server, which requests use by name."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request

from api_schemas.detectors import Detector, DetectorUpload, NewDetector
from api_schemas.training import DetectorTrainingEvent, DetectorTrainingRequest
from app.catalog.detector_training import train_detector
from app.catalog.detectors import Detectors
from app.http.openapi import error_responses
from app.routes.catalog import routes_of, upload_body
from app.routes.parameters import Intervener, ServerComponents
from app.routes.training import add_training_route

router: Final = routes_of(
    Detectors.kind,
    "Returns the detector's parts, its calibration, its origin and its training.",
    (
        "Fetch a detector as a safetensors file",
        "Tensors `parts.N.weights` and so on, and the head as JSON in the metadata `detector`.",
    ),
)


@router.post(
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
    router,
    Detectors.kind,
    DetectorTrainingRequest,
    DetectorTrainingEvent,
    train_detector,
    summary="Train a detector from labelled prompts",
    description="Captures each prompt's residual stream, fits a detector, calibrates it on held-out prompts.",
)
