"""The body of ``POST /v1/detectors``, parsed in a thread: head and numbers in JSON, or a file in a form."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from typing import Any, Final, Literal

from starlette.requests import Request

from api_schemas.detectors import NewDetector, NewPart, RocPoint
from api_schemas.fields import Strict
from api_schemas.limits import RequestLimits
from api_schemas.names import StoredName
from app.body import BodyLimits, check_media_type, read_bytes, read_object
from app.detectors.files import check_size, read_file
from app.detectors.parts import detector_of, part_of
from app.errors import validated
from app.forms import FORM_TYPE, read_form
from app.vectors.files import SLACK_BYTES
from app.vectors.uploads import array_of
from nnsight_engine.core.detector import TENSORS, Detector
from nnsight_engine.core.model_spec import ModelSpec

_WIDENING: Final = 2
"""Bytes of the widest dtype of files over those of float32."""
_TENSORS: Final = tuple(dict.fromkeys(name for names in TENSORS.values() for name in names))


class _Form(Strict):
    name: StoredName
    head: str | None = None
    shared: Literal["true", "false"] = "false"


@dataclasses.dataclass(frozen=True, slots=True)
class UploadedDetector:
    """An upload, validated against the model; ``sha256`` is that of the file, None for JSON bodies."""

    name: str
    shared: bool
    format: Literal["safetensors", "json"]
    sha256: str | None
    detector: Detector
    calibration: list[RocPoint]


async def read_upload(
    request: Request, spec: ModelSpec, limits: BodyLimits, max_tensor_bytes: int
) -> UploadedDetector:
    """Raise ApiError for an invalid body, ClientDisconnect if the client left before its end."""
    content_type = request.headers.get("content-type", "")
    if content_type.split(";", maxsplit=1)[0].strip().lower() == FORM_TYPE:
        limit = min(_WIDENING * max_tensor_bytes + SLACK_BYTES, limits.max_bytes)
        body = await read_bytes(request, limit, limits.idle_s)
        return await asyncio.to_thread(_read_form, bytes(body), content_type, spec, max_tensor_bytes)
    check_media_type(request, "application/json")
    value = await read_object(request, limits)
    return await asyncio.to_thread(_read_numbers, value, spec, max_tensor_bytes)


def _read_form(body: bytes, content_type: str, spec: ModelSpec, max_bytes: int) -> UploadedDetector:
    fields, (name, content) = read_form(body, content_type, _Form.model_fields, "a detector")
    form = validated(_Form, fields)
    detector, calibration = read_file(content, name, form.head, spec, max_bytes)
    sha256 = hashlib.sha256(content).hexdigest()
    return UploadedDetector(form.name, form.shared == "true", "safetensors", sha256, detector, calibration)


def _read_numbers(value: dict[str, Any], spec: ModelSpec, max_bytes: int) -> UploadedDetector:
    new = validated(NewDetector, value, RequestLimits(max_tensor_bytes=max_bytes))
    tensors = [_arrays(part, f"parts.{index}") for index, part in enumerate(new.parts)]
    check_size((tensor for several in tensors for tensor in several.values()), max_bytes, "parts")
    parts = [
        part_of(part, several, spec, f"parts.{index}")
        for index, (part, several) in enumerate(zip(new.parts, tensors, strict=True))
    ]
    detector = detector_of(parts, new.bias, new.link, new.threshold, spec)
    return UploadedDetector(new.name, new.shared, "json", None, detector, list(new.calibration))


def _arrays(part: NewPart, param: str) -> dict[str, Any]:
    given = {name: getattr(part, name) for name in _TENSORS}
    return {name: array_of(tensor, f"{param}.{name}") for name, tensor in given.items() if tensor is not None}


__all__ = ["UploadedDetector", "read_upload"]
