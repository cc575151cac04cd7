"""Reader of ``.npz`` files: a zip of ``.npy`` arrays. Only arrays of floats are read, never a pickle.

numpy's own reader allocates as much as a header claims, and unpacks as much as a zip contains; here sizes
are checked first. Only the output of ``numpy.savez`` and ``numpy.savez_compressed`` is accepted.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from api_schemas.errors import ApiError, ErrorCode, clip
from app.formats.uploads import Tensors

_PARAM: Final = "file"
_END: Final = b"PK\x05\x06"
_END_BYTES: Final = 22
_END_SIZE: Final = slice(12, 16)
_ZIP64_LOCATOR: Final = b"PK\x06\x07"
_ZIP64_LOCATOR_BYTES: Final = 20
_ZIP64_END_BYTES: Final = 56
_ZIP64_END_SIZE: Final = slice(40, 48)
"""Where the directory's size is in each of the two records at the end."""
_ENTRY_BYTES: Final = 128
_MAX_COMMENT: Final = 65535
_MAX_ENTRIES: Final = 4096
_MAX_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of all arrays, unpacked: more than any model's vector needs."""
_METHODS: Final = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_HEADERS: Final[dict[tuple[int, int], Callable[[io.BytesIO], Any]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_BROKEN: Final = (
    zipfile.BadZipFile, zlib.error, EOFError, MemoryError, NotImplementedError, OSError, OverflowError,
    RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""The exceptions of zipfile and numpy for malformed files."""


def read(data: bytes) -> Tensors:
    """Return the arrays by name.

    Raises ApiError: ``unsupported_vector_format`` (pickles), ``tensor_too_large``, ``wrong_dtype``.
    """
    _check_directory(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _check_entries(entries)
            return {_name(entry): _array(archive.read(entry), _name(entry)) for entry in entries}
    except _BROKEN as error:
        raise _invalid(f"The .npz file is broken: {clip(str(error))}.") from error


def _check_directory(data: bytes) -> None:
    """Refuse a directory of too many entries before zipfile creates an object for each."""
    directory_end = data.rfind(_END, max(0, len(data) - _END_BYTES - _MAX_COMMENT))
    if directory_end < 0 or len(data) - directory_end < _END_BYTES:
        raise _invalid("The .npz file is cut off: its end is missing.")
    num_bytes = int.from_bytes(data[directory_end:][_END_SIZE], "little")
    locator_start = directory_end - _ZIP64_LOCATOR_BYTES
    if locator_start >= _ZIP64_END_BYTES and data[locator_start:directory_end].startswith(_ZIP64_LOCATOR):
        record = data[locator_start - _ZIP64_END_BYTES : locator_start]
        num_bytes = int.from_bytes(record[_ZIP64_END_SIZE], "little")
    if num_bytes > _MAX_ENTRIES * _ENTRY_BYTES:
        raise _invalid(f"A vector's .npz file has at most {_MAX_ENTRIES} arrays; its directory is for more.")


def _check_entries(entries: list[zipfile.ZipInfo]) -> None:
    names = [entry.filename for entry in entries]
    if any(name.endswith((".pkl", ".pickle")) for name in names):
        raise ApiError(
            ErrorCode.UNSUPPORTED_FORMAT,
            "This is a zip file with a pickle in it, as torch.save writes, and reading a pickle runs its "
            "code: no server accepts one. Save rows by layer with safetensors: "
            "safetensors.torch.save_file({'layers.10': row}, 'joy.safetensors').",
            _PARAM,
        )
    strange = next((name for name in names if not name.endswith(".npy")), None)
    if strange is not None:
        raise _invalid(f"A .npz file has .npy arrays alone; this zip file has {clip(strange)!r}.")
    if len(set(names)) < len(names) or len(names) > _MAX_ENTRIES:
        raise _invalid(f"Arrays must have different names, and be at most {_MAX_ENTRIES}.")
    for entry in entries:
        if entry.compress_type not in _METHODS:
            raise _invalid("Arrays must be stored as numpy.savez or numpy.savez_compressed do.")
    num_bytes = sum(entry.file_size for entry in entries)
    if num_bytes > _MAX_BYTES:
        raise ApiError(
            ErrorCode.TENSOR_TOO_LARGE,
            f"The arrays of a .npz file may have {_MAX_BYTES} bytes unpacked; these claim {num_bytes}.",
            _PARAM,
        )


def _name(entry: zipfile.ZipInfo) -> str:
    return entry.filename.removesuffix(".npy")


def _array(content: bytes, name: str) -> npt.NDArray[Any]:
    """Return an array of floats of a .npy file; raises ApiError for objects, other types and wrong sizes."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]  # it has no types
    header = _HEADERS.get(version)
    if header is None:
        raise _invalid(f"The array {clip(name)!r} is of a version of .npy that no array of floats needs.")
    shape, is_fortran, dtype = header(file)
    if dtype.hasobject:
        raise ApiError(
            ErrorCode.UNSUPPORTED_FORMAT,
            f"The array {clip(name)!r} has Python objects, which are pickled, and reading a pickle "
            "runs its code: no server accepts one. Save floats: row.astype('float32').",
            _PARAM,
        )
    if dtype.kind != "f" or dtype.itemsize > np.dtype(np.float64).itemsize:
        raise ApiError(
            ErrorCode.WRONG_DTYPE,
            f"A vector's dtype must be one of float64, float32, float16; {clip(name)!r} has "
            f"{clip(str(dtype))}.",
            _PARAM,
        )
    data = content[file.tell() :]
    if math.prod(shape) * dtype.itemsize != len(data) or any(size < 0 for size in shape):
        raise _invalid(f"The array {clip(name)!r} claims another size than its {len(data)} bytes have.")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_VECTOR_FILE, message, _PARAM)
