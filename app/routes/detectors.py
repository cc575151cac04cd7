"""``/v1/detectors``: detectors stored on the server, which requests use by name."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_schemas.detectors import Detector, DetectorList, DetectorUpload, NewDetector
from api_schemas.training import DetectorTrainingEvent, DetectorTrainingRequest
from app.formats.uploads import FORM_TYPE
from app.http.openapi import (
    BINARY,
    EVENTS_TYPE,
    SAFETENSORS_TYPE,
    AfterId,
    OfName,
    PageLimit,
    error_responses,
    json_body,
    json_events,
    schema_of,
)
from app.routes.context import Asked, Intervener, Served, Trains
from app.routes.training import training_answer

router = APIRouter(prefix="/v1/detectors", tags=["detectors"])

TRAINING_EVENTS: Final = json_events(DetectorTrainingEvent, last="[DONE]")

_BODY: Final = json_body(NewDetector)
_BODY["requestBody"]["content"][FORM_TYPE] = {"schema": schema_of(DetectorUpload)}


@router.post(
    "",
    status_code=201,
    summary="Keep a detector",
    openapi_extra=_BODY,
    responses=error_responses(400, 409, 413, 415, 422, 503),
)
async def create_detector(request: Request, context: Served, caller: Intervener) -> Detector:
    """Head and numbers as JSON, or a safetensors file in a form."""
    return await context.detectors.create(request, caller)


@router.post(
    "/train",
    status_code=201,
    summary="Train a detector from labelled prompts",
    openapi_extra=json_body(DetectorTrainingRequest),
    responses={
        200: {
            "description": "With `stream`: progress events, then the detector; ends with `[DONE]`.",
            "content": {EVENTS_TYPE: {"schema": TRAINING_EVENTS}},
        },
        201: {"model": Detector, "description": "The detector."},
        **error_responses(400, 404, 409, 413, 422, 429, 500, 503),
    },
    response_model=None,
)
async def train_detector(request: Request, context: Served, asked: Asked, caller: Trains) -> Response:
    """Captures each prompt's residual stream, fits a detector, calibrates it on held-out prompts."""
    return await training_answer(
        request,
        context,
        asked,
        caller,
        DetectorTrainingRequest,
        context.detector_trainer.train,
        lambda detector: DetectorTrainingEvent(type="detector", detector=detector),
    )


@router.get("", summary="List detectors, the newest first", responses=error_responses(404, 503))
async def list_detectors(
    context: Served,
    caller: Intervener,
    limit: PageLimit = 20,
    after: AfterId = None,
    name: OfName = None,
) -> DetectorList:
    """The caller's own detectors and shared ones; pass a page's `last_id` as `after` for the next."""
    return await context.detectors.page(caller.tenant, name=name, after=after, limit=limit)


@router.get("/{detector_id}", summary="Describe a detector", responses=error_responses(404, 503))
async def get_detector(detector_id: str, context: Served, caller: Intervener) -> Detector:
    """Returns the detector's parts, its calibration, its origin and its training."""
    return await context.detectors.get(detector_id, caller.tenant)


@router.get(
    "/{detector_id}/content",
    summary="Fetch a detector as a safetensors file",
    response_class=Response,
    responses={
        200: {"description": "A safetensors file.", "content": {SAFETENSORS_TYPE: {"schema": BINARY}}},
        **error_responses(404, 503),
    },
)
async def get_detector_content(detector_id: str, context: Served, caller: Intervener) -> Response:
    """Tensors `parts.N.weights` and so on, and the head as JSON in the metadata `detector`."""
    content = await context.detectors.content(detector_id, caller.tenant)
    return Response(content, media_type=SAFETENSORS_TYPE, headers={"Cache-Control": "private, no-store"})


@router.delete(
    "/{detector_id}", status_code=204, summary="Remove a detector", responses=error_responses(404, 503)
)
async def delete_detector(detector_id: str, context: Served, caller: Intervener) -> None:
    """Running requests go on; the version number is not reused. Shared ones need the scope `admin`."""
    await context.detectors.remove(detector_id, caller)
