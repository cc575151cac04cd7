"""Vector files, read as untrusted input: the first bytes determine the format, and no pickle is ever loaded.

A file is limited to the size of the model's largest vector in float64 plus overhead, so readers hold it in
memory. Every size in a header is checked against the data before anything is allocated. Runs in a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import safetensors
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.fields import Items, Number
from app.body_json import exceeds_depth
from app.errors import problem_text
from app.vectors import gguf_file, npz_file
from app.vectors.rows import Tensors
from nnsight_engine.core.dtypes import floats_from_bytes

Format = Literal["safetensors", "npz", "gguf", "json"]

PARAM: Final = "file"
SLACK_BYTES: Final = 1024 * 1024
"""Maximum bytes of a file beside its numbers."""

_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 512 * 1024
_MAX_DEPTH: Final = 8
_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_ZIP: Final = b"PK\x03\x04"
_NPY: Final = b"\x93NUMPY"
_PICKLE: Final = re.compile(rb"\x80[\x00-\x05]")
_PICKLED: Final = frozenset({"pt", "pth", "bin", "pkl", "pickle", "ckpt", "joblib"})
_ADVICE: Final = (
    "Save rows by layer with safetensors: safetensors.torch.save_file({'layers.10': row}, 'joy.safetensors')."
)


class _JsonFile(BaseModel):
    """A JSON file with the rows by layer in the field ``vectors``."""

    model_config = ConfigDict(extra="forbid")

    vectors: dict[str, Items[Number]] = Field(min_length=1)


_ROWS: Final = TypeAdapter(dict[str, Items[Number]])


def read_file(data: bytes, name: str) -> tuple[Format, Tensors]:
    """Return the format of a file, and its tensors by name.

    Args:
        data: Its content.
        name: Its file name; only used to refuse formats by the extension.

    Raises:
        ApiError: ``unsupported_vector_format``, ``invalid_vector_file``, ``wrong_dtype``, ``json_too_deep``,
            ``not_finite``, and the errors of the formats' readers.
    """
    _refuse_by_name(name)
    for begins, kind, read in _READERS:
        if begins(data):
            return kind, read(data)
    _refuse_by_content(data)
    raise ApiError(
        ErrorCode.UNSUPPORTED_FORMAT,
        "The file is none of safetensors, .npz, a GGUF control vector and JSON, by its first bytes "
        f"{bytes(data[:8])!r}. {_ADVICE}",
        PARAM,
    )


def _refuse_by_name(name: str) -> None:
    ending = name.rpartition(".")[2].lower() if "." in name else ""
    if ending in _PICKLED:
        raise _pickle(f"A .{ending} file is a pickle, or may be one")
    if ending == "npy":
        raise _unnamed()


def _refuse_by_content(data: bytes) -> None:
    if _PICKLE.match(data):
        raise _pickle("This file is a pickle")
    if data.startswith(_NPY):
        raise _unnamed()


def _pickle(text: str) -> ApiError:
    return ApiError(
        ErrorCode.UNSUPPORTED_FORMAT,
        f"{text}, and reading a pickle runs its code: no server accepts one. {_ADVICE}",
        PARAM,
    )


def _unnamed() -> ApiError:
    return ApiError(
        ErrorCode.UNSUPPORTED_FORMAT,
        "A .npy file has one array without a name, or pickled objects. Save rows by layer: "
        "numpy.savez('joy.npz', **{'layers.10': row}).",
        PARAM,
    )


def _is_safetensors(data: bytes) -> bool:
    return data[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def _read_safetensors(data: bytes) -> Tensors:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > min(_MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise ApiError(
            ErrorCode.INVALID_VECTOR_FILE,
            f"The safetensors header claims {length} bytes, of {len(data)} that the file has; a vector's has "
            f"at most {_MAX_HEADER_BYTES}.",
            PARAM,
        )
    try:
        entries = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # it has no types
        return {name: _tensor(name, entry) for name, entry in entries}
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        # safetensors allows shapes that numpy refuses: too many dimensions, or huge ones beside an empty one.
        raise ApiError(
            ErrorCode.INVALID_VECTOR_FILE, f"The safetensors file is broken: {clip(str(error))}.", PARAM
        ) from error


def _tensor(name: str, entry: dict[str, Any]) -> npt.NDArray[Any]:
    dtype, content = entry["dtype"], bytes(entry["data"])
    if dtype == "BF16":
        return floats_from_bytes("bfloat16", content).reshape(entry["shape"])
    if dtype not in _DTYPES:
        raise ApiError(
            ErrorCode.WRONG_DTYPE,
            f"A vector's dtype must be one of {', '.join(_DTYPES)}, BF16; {clip(name)!r} has "
            f"{clip(str(dtype))}.",
            PARAM,
        )
    return np.frombuffer(content, _DTYPES[dtype]).reshape(entry["shape"])


def _read_json(data: bytes) -> Tensors:
    if exceeds_depth(data, _MAX_DEPTH):
        raise ApiError(ErrorCode.JSON_TOO_DEEP, f"A vector's JSON nests at most {_MAX_DEPTH} deep.", PARAM)
    try:
        value = json.loads(data.decode("utf-8-sig"))
        nested = isinstance(value, dict) and "vectors" in value
        rows = _JsonFile.model_validate(value).vectors if nested else _ROWS.validate_python(value)
    except ValidationError as error:
        found = error.errors()
        code = ErrorCode.INVALID_VECTOR_FILE
        if any(one["type"] == "finite_number" for one in found):
            code = ErrorCode.NOT_FINITE
        message = f"The JSON must be lists of numbers by layer, {{'10': [0.5, …]}}: {problem_text(found)}."
        raise ApiError(code, message, PARAM) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(
            ErrorCode.INVALID_VECTOR_FILE, f"The file is no JSON in UTF-8: {clip(str(error))}.", PARAM
        ) from error
    return {name: np.asarray(row, np.float64) for name, row in rows.items()}


_READERS: Final[tuple[tuple[Callable[[bytes], bool], Format, Callable[[bytes], Tensors]], ...]] = (
    (lambda data: data.startswith(_ZIP), "npz", npz_file.read),
    (lambda data: data.startswith(gguf_file.MAGIC), "gguf", gguf_file.read),
    (_is_safetensors, "safetensors", _read_safetensors),
    (lambda data: data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{", "json", _read_json),
)


__all__ = ["PARAM", "SLACK_BYTES", "Format", "read_file"]
