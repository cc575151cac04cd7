"""Reader of GGUF control vectors, as llama.cpp and repeng write them: ``direction.N`` is added after layer N.

The package ``gguf`` trusts its files: it maps them from disk and creates as many objects as a header claims.
This reader checks every length against the file's size.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from api_schemas.errors import ApiError, ErrorCode, clip
from app.formats.uploads import Tensors
from nnsight_engine.core.dtypes import floats_from_bytes

MAGIC: Final = b"GGUF"

_PARAM: Final = "file"
_ARCHITECTURE: Final = "general.architecture"
_ALIGNMENT: Final = "general.alignment"
_CONTROL_VECTOR: Final = "controlvector"
_VERSIONS: Final = frozenset({2, 3})
_MAX_ENTRIES: Final = 4096
_MAX_NAME_BYTES: Final = 256
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 2**16
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALAR_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_DTYPES: Final = {0: ("float32", 4), 1: ("float16", 2), 28: ("float64", 8), 30: ("bfloat16", 2)}
_NAME: Final = re.compile(r"direction\.[1-9][0-9]{0,5}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Info:
    name: str
    num_items: int
    kind: int
    offset: int


class _ByteReader:
    """A reader of the file from its start; raises ApiError beyond its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def read_bytes(self, num_bytes: int) -> bytes:
        stop = self.position + num_bytes
        if stop > len(self._data):
            raise _invalid(f"The GGUF file is cut off: it needs byte {stop} and has {len(self._data)}.")
        content = self._data[self.position : stop]
        self.position = stop
        return content

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.read_bytes(num_bytes), "little")

    def text(self, max_bytes: int | None = None) -> str:
        num_bytes = self.number(8)
        if max_bytes is not None and num_bytes > max_bytes:
            raise _invalid(f"A name in a GGUF file has at most {max_bytes} bytes, got {num_bytes}.")
        return self.read_bytes(num_bytes).decode("utf-8", "replace")

    def skip(self, kind: int) -> None:
        """Skip a value; ``kind`` is GGUF's number of its type."""
        if kind == _STRING:
            self.read_bytes(self.number(8))
        elif kind == _ARRAY:
            self._skip_array()
        else:
            self.read_bytes(_scalar_bytes(kind))

    def _skip_array(self) -> None:
        kind, num_items = self.number(4), self.number(8)
        if kind == _ARRAY:
            raise _invalid("A GGUF control vector has no arrays of arrays.")
        if kind != _STRING:
            self.read_bytes(num_items * _scalar_bytes(kind))
            return
        for _ in range(num_items):  # each item has at least eight bytes, so the file's size bounds the loop
            self.skip(_STRING)


def read(data: bytes) -> Tensors:
    """Return the directions by name.

    Raises ApiError ``unsupported_vector_format``, ``invalid_vector_file``, ``wrong_dtype`` (quantized).
    """
    file = _ByteReader(data)
    file.read_bytes(len(MAGIC))
    version = file.number(4)
    if version not in _VERSIONS:
        raise _invalid(f"GGUF files of version 2 or 3, little-endian, are read; got version {version}.")
    num_tensors, num_fields = file.number(8), file.number(8)
    if max(num_tensors, num_fields) > _MAX_ENTRIES:
        raise _invalid(f"A GGUF control vector has at most {_MAX_ENTRIES} fields and tensors.")
    alignment = _read_alignment(file, num_fields)
    infos = [_read_info(file) for _ in range(num_tensors)]
    data_start = -(-file.position // alignment) * alignment  # the next multiple
    if sum(info.num_items for info in infos) > len(data) - file.position:
        # Overlapping tensors would multiply the memory, since each is a copy of its bytes.
        raise _invalid("The GGUF file's tensors claim more numbers than it has bytes.")
    tensors: dict[str, npt.NDArray[Any]] = {}
    for info in infos:
        if info.name in tensors:
            raise _invalid(f"Tensors must have different names; two are {clip(info.name)!r}.")
        tensors[info.name] = _read_tensor(data, data_start, info)
    return tensors


def _read_alignment(file: _ByteReader, num_fields: int) -> int:
    """Read the fields of the header, check that it is a control vector, and return the data's alignment."""
    architecture, alignment = "", _DEFAULT_ALIGNMENT
    for _ in range(num_fields):
        key, kind = file.text(_MAX_NAME_BYTES), file.number(4)
        if key == _ARCHITECTURE and kind == _STRING:
            architecture = file.text(_MAX_NAME_BYTES)
        elif key == _ALIGNMENT and kind == _UINT32:
            alignment = file.number(4)
        else:
            file.skip(kind)
    if architecture != _CONTROL_VECTOR:
        raise ApiError(
            ErrorCode.UNSUPPORTED_FORMAT,
            f"Of GGUF files, control vectors are taken ({_ARCHITECTURE} {_CONTROL_VECTOR!r}); this one is "
            f"{clip(architecture)!r}.",
            _PARAM,
        )
    if alignment <= 0 or alignment > _MAX_ALIGNMENT:
        raise _invalid(f"A GGUF file's alignment must lie between 1 and {_MAX_ALIGNMENT}, got {alignment}.")
    return alignment


def _read_info(file: _ByteReader) -> _Info:
    """Read where the header says that a tensor's data is."""
    name = file.text(_MAX_NAME_BYTES)
    if _NAME.fullmatch(name) is None:
        raise _invalid(
            f"Tensors of a control vector are direction.1, direction.2 and so on; got {clip(name)!r}."
        )
    num_dimensions = file.number(4)
    if num_dimensions > _MAX_DIMENSIONS:
        raise _invalid(f"A direction has one dimension; {clip(name)!r} claims {num_dimensions}.")
    num_items = math.prod(file.number(8) for _ in range(num_dimensions))
    return _Info(name, num_items, file.number(4), file.number(8))


def _read_tensor(data: bytes, data_start: int, info: _Info) -> npt.NDArray[Any]:
    dtype_and_bytes = _DTYPES.get(info.kind)
    if dtype_and_bytes is None:
        raise ApiError(
            ErrorCode.WRONG_DTYPE,
            f"Directions must be F32, F16, BF16 or F64; {clip(info.name)!r} has GGML's type {info.kind}.",
            _PARAM,
        )
    dtype, item_bytes = dtype_and_bytes
    start = data_start + info.offset
    stop = start + info.num_items * item_bytes
    if stop > len(data):
        raise _invalid(
            f"{clip(info.name)!r} lies beyond the file's end: it needs byte {stop} of {len(data)}."
        )
    content = data[start:stop]
    return np.frombuffer(content, "<f8") if dtype == "float64" else floats_from_bytes(dtype, content)


def _scalar_bytes(kind: int) -> int:
    num_bytes = _SCALAR_BYTES.get(kind)
    if num_bytes is None:
        raise _invalid(f"The GGUF file has a field of a type that there is not, {kind}.")
    return num_bytes


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_VECTOR_FILE, message, _PARAM)
