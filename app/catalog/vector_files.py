"""Vector files, read as untrusted input: the first bytes determine the format, and no pickle is ever loaded.

A file is limited to the size of the model's largest vector in float64 plus overhead, so readers hold it in
memory. Every size in a header is checked against the data before anything is allocated. Files and the body of
``POST /v1/vectors`` (numbers in JSON, or a file in a form) become the version to be stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.fields import Items, Number, RequestLimits, StoredName, Strict
from api_schemas.tensors import TensorInput, VectorName
from api_schemas.vectors import NewVector, Training
from app.catalog import gguf_file, npz_file
from app.catalog.rows import ModelShape, VectorRows, rows_of
from app.formats.json_bodies import exceeds_depth, parse_object
from app.formats.uploads import FILE, Tensors, is_safetensors, read_safetensors, refuse_pickle
from app.http.errors import problem_text, validated
from app.storage.versions import NewVersion
from nnsight_engine.core.dtypes import floats_from_bytes
from nnsight_engine.plans.compile.tensors import read_tensor

Format = Literal["safetensors", "npz", "gguf", "json"]

SLACK_BYTES: Final = 1024 * 1024
"""Maximum bytes of a file beside its numbers."""

_MAX_DEPTH: Final = 8
_ZIP: Final = b"PK\x03\x04"
_NPY: Final = b"\x93NUMPY"
_ADVICE: Final = (
    "Save rows by layer with safetensors: safetensors.torch.save_file({'layers.10': row}, 'joy.safetensors')."
)


class _JsonFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    vectors: dict[str, Items[Number]] = Field(min_length=1)


_ROWS: Final = TypeAdapter(dict[str, Items[Number]])


def read_file(data: bytes, name: str) -> tuple[Format, Tensors]:
    """Return the format of a file, and its tensors by name; raises ApiError."""
    refuse_pickle(name, data, _ADVICE)
    if name.lower().endswith(".npy") or data.startswith(_NPY):
        raise ApiError(
            ErrorCode.UNSUPPORTED_FORMAT,
            "A .npy file has one array without a name, or pickled objects. Save rows by layer: "
            "numpy.savez('joy.npz', **{'layers.10': row}).",
            FILE,
        )
    for begins, kind, read in _READERS:
        if begins(data):
            return kind, read(data)
    raise ApiError(
        ErrorCode.UNSUPPORTED_FORMAT,
        "The file is none of safetensors, .npz, a GGUF control vector and JSON, by its first bytes "
        f"{bytes(data[:8])!r}. {_ADVICE}",
        FILE,
    )


def read_provenance(data: bytes, rows: VectorRows) -> tuple[str, Training | None, bool]:
    """Return the model that a file names, its training, and whether it has one of other numbers.

    The model is empty if the file names none; a GGUF control vector has a family, ``llama``.
    """
    if not is_safetensors(data):
        return "", None, False
    metadata = read_safetensors(data, ErrorCode.INVALID_VECTOR_FILE).metadata
    model, text = metadata.get("model", ""), metadata.get("training")
    if text is None:
        return model, None, False
    body = text.encode("utf-8", "surrogatepass")
    if exceeds_depth(body, _MAX_DEPTH):
        raise ApiError(ErrorCode.JSON_TOO_DEEP, f"A vector's training nests at most {_MAX_DEPTH} deep.", FILE)
    try:
        training = validated(Training, parse_object(body))
    except ApiError as error:
        raise ApiError(error.code, f"The file's metadata `training`: {error.message}", FILE) from error
    is_its_own = (
        metadata.get("sha256") == rows.sha256
        and tuple(score.layer for score in training.layers) == rows.layers
    )
    return model, training if is_its_own else None, not is_its_own


def _read_json(data: bytes) -> Tensors:
    """Return the rows of a JSON file by name: an object of lists of numbers, or its field ``vectors``."""
    if exceeds_depth(data, _MAX_DEPTH):
        raise ApiError(ErrorCode.JSON_TOO_DEEP, f"A vector's JSON nests at most {_MAX_DEPTH} deep.", FILE)
    try:
        value = json.loads(data.decode("utf-8-sig"))
        nested = isinstance(value, dict) and "vectors" in value
        rows = _JsonFile.model_validate(value).vectors if nested else _ROWS.validate_python(value)
    except ValidationError as error:
        problems = error.errors()
        code = ErrorCode.INVALID_VECTOR_FILE
        if any(problem["type"] == "finite_number" for problem in problems):
            code = ErrorCode.NOT_FINITE
        message = f"The JSON must be lists of numbers by layer, {{'10': [0.5, …]}}: {problem_text(problems)}."
        raise ApiError(code, message, FILE) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(
            ErrorCode.INVALID_VECTOR_FILE, f"The file is no JSON in UTF-8: {clip(str(error))}.", FILE
        ) from error
    return {name: np.asarray(row, np.float64) for name, row in rows.items()}


_READERS: Final[tuple[tuple[Callable[[bytes], bool], Format, Callable[[bytes], Tensors]], ...]] = (
    (lambda data: data.startswith(_ZIP), "npz", npz_file.read),
    (lambda data: data.startswith(gguf_file.MAGIC), "gguf", gguf_file.read),
    (
        is_safetensors,
        "safetensors",
        lambda data: read_safetensors(data, ErrorCode.INVALID_VECTOR_FILE).tensors,
    ),
    (lambda data: data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{", "json", _read_json),
)


_WIDEST_ITEM_BYTES: Final = 8
_JSON_ITEM_BYTES: Final = 32


class VectorForm(Strict):
    name: StoredName
    at: str | None = None
    shared: Literal["true", "false"] = "false"


class UploadedVector(NamedTuple):
    """An upload, validated against the model; ``has_other_training``: its file has that of other numbers.

    ``model`` is empty if the file names none.
    """

    new: NewVersion
    model: str = ""
    has_other_training: bool = False


def upload_bytes(shape: ModelShape) -> dict[str, int]:
    """Return the maximum bytes of an upload as a form and as JSON."""
    return {
        "form_bytes": shape.max_numbers * _WIDEST_ITEM_BYTES + SLACK_BYTES,
        "json_bytes": shape.max_numbers * _JSON_ITEM_BYTES + SLACK_BYTES,
    }


def from_json(shape: ModelShape, value: dict[str, Any]) -> UploadedVector:
    """Return the vector of a JSON body: ``vectors`` by layer, or ``values`` with ``at``; raises ApiError."""
    limits = RequestLimits(max_tensor_bytes=shape.max_numbers * _WIDEST_ITEM_BYTES)
    new = validated(NewVector, value, limits)
    if new.vectors is not None:
        tensors = {name: array_of(tensor, f"vectors.{clip(name)}") for name, tensor in new.vectors.items()}
        rows = rows_of(tensors, None, shape, "vectors")
    else:
        rows = rows_of({"values": array_of(new.values, "values")}, new.at, shape, "values")
    return UploadedVector(rows.new_version(new.name, "json", shared=new.shared))


def from_form(shape: ModelShape, form: VectorForm, name: str, content: bytes) -> UploadedVector:
    """Return the vector of a form; ``name`` and ``content`` are its file's. Raises ApiError."""
    at = None if not form.at else [part.strip() for part in form.at.split(",")]
    format_, tensors = read_file(content, name)
    rows = rows_of(tensors, at, shape, FILE)
    model, training, has_other = read_provenance(content, rows)
    sha256, shared = hashlib.sha256(content).hexdigest(), form.shared == "true"
    new = rows.new_version(form.name, format_, shared=shared, source_sha256=sha256, training=training)
    return UploadedVector(new, model, has_other)


def array_of(value: TensorInput | None, param: str) -> npt.NDArray[Any]:
    """Return a tensor's numbers; ApiError ``invalid_shape`` if there is none, or a name; ``not_finite``."""
    if value is None or isinstance(value, VectorName):
        raise ApiError(ErrorCode.INVALID_SHAPE, "It is made of numbers, or a tensor object.", param)
    tensor = read_tensor(value, param)
    return floats_from_bytes(tensor.dtype, tensor.data).reshape(tensor.shape)
