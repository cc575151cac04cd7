"""The body of ``POST /v1/vectors``, parsed in a thread: numbers in JSON, or a file in a form.

Its size is limited to that of the model's largest vector. Nothing is stored here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from typing import Any, Final, Literal

import numpy.typing as npt
from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.fields import Strict
from api_schemas.limits import RequestLimits
from api_schemas.names import StoredName
from api_schemas.tensors import TensorInput, VectorName
from api_schemas.vectors import NewVector, Training
from app.body import BodyLimits, check_media_type, read_bytes, read_object
from app.errors import validated
from app.forms import FILE, FORM_TYPE, read_form
from app.storage.vector_rows import VectorRows
from app.vectors.files import SLACK_BYTES, Format, read_file, read_provenance
from app.vectors.rows import ModelShape, rows_of
from nnsight_engine.core.dtypes import floats_from_bytes
from nnsight_engine.plans.compile.tensors import read_tensor

_WIDEST_ITEM_BYTES: Final = 8
_JSON_ITEM_BYTES: Final = 32


class _Form(Strict):
    name: StoredName
    at: str | None = None
    shared: Literal["true", "false"] = "false"


@dataclasses.dataclass(frozen=True, slots=True)
class UploadedVector:
    """An upload, validated against the model; ``has_other_training``: its file has that of other numbers.

    ``sha256`` is None for JSON bodies; ``model`` is empty if the file names none.
    """

    name: str
    shared: bool
    format: Format
    sha256: str | None
    rows: VectorRows
    model: str = ""
    training: Training | None = None
    has_other_training: bool = False


async def read_upload(request: Request, shape: ModelShape, limits: BodyLimits) -> UploadedVector:
    """Raise ApiError for an invalid body, ClientDisconnect if the client left before its end."""
    media_type = request.headers.get("content-type", "").split(";", maxsplit=1)[0].strip().lower()
    if media_type == FORM_TYPE:
        limit = min(shape.max_numbers * _WIDEST_ITEM_BYTES + SLACK_BYTES, limits.max_bytes)
        body = await read_bytes(request, limit, limits.idle_s)
        content_type = request.headers["content-type"]
        return await asyncio.to_thread(_read_form, bytes(body), content_type, shape)
    check_media_type(request, "application/json")
    limit = min(shape.max_numbers * _JSON_ITEM_BYTES + SLACK_BYTES, limits.max_bytes)
    value = await read_object(request, BodyLimits(limit, limits.max_depth, limits.idle_s))
    return await asyncio.to_thread(_read_numbers, value, shape)


def _read_numbers(value: dict[str, Any], shape: ModelShape) -> UploadedVector:
    limits = RequestLimits(max_tensor_bytes=shape.max_numbers * _WIDEST_ITEM_BYTES)
    new = validated(NewVector, value, limits)
    if new.vectors is not None:
        tensors = {name: array_of(tensor, f"vectors.{clip(name)}") for name, tensor in new.vectors.items()}
        rows = rows_of(tensors, None, shape, "vectors")
    else:
        rows = rows_of({"values": array_of(new.values, "values")}, new.at, shape, "values")
    return UploadedVector(new.name, new.shared, "json", None, rows)


def array_of(value: TensorInput | None, param: str) -> npt.NDArray[Any]:
    """Raise ApiError ``invalid_shape`` if the tensor is a name; ``not_finite``."""
    if value is None or isinstance(value, VectorName):
        raise ApiError(ErrorCode.INVALID_SHAPE, "It is made of numbers, or a tensor object.", param)
    tensor = read_tensor(value, param)
    return floats_from_bytes(tensor.dtype, tensor.data).reshape(tensor.shape)


def _read_form(body: bytes, content_type: str, shape: ModelShape) -> UploadedVector:
    fields, (name, content) = read_form(body, content_type, _Form.model_fields, "a vector")
    form = validated(_Form, fields)
    at = None if not form.at else [part.strip() for part in form.at.split(",")]
    format_, tensors = read_file(content, name)
    rows = rows_of(tensors, at, shape, FILE)
    sha256 = hashlib.sha256(content).hexdigest()
    provenance = read_provenance(content, rows)
    return UploadedVector(form.name, form.shared == "true", format_, sha256, rows, *provenance)


__all__ = ["UploadedVector", "array_of", "read_upload"]
