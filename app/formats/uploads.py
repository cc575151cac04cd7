"""Uploads as untrusted input: forms with a file, as OpenAI's clients send files, and files of tensors.

A form is taken apart with bounds of its own. Each size in the header of a file of tensors is checked before
anything is allocated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, create_form_parser

from api_schemas.errors import ApiError, ErrorCode, clip
from nnsight_engine.core.dtypes import floats_from_bytes

FORM_TYPE: Final = "multipart/form-data"
FILE: Final = "file"
"""The name of the field with the file."""

_MAX_FIELD_BYTES: Final = 64 * 1024


def read_form(
    body: bytes, content_type: str, names: Collection[str], purpose: str
) -> tuple[dict[str, str], tuple[str, bytes]]:
    """Return a form's fields, and its file's name and content; errors are ``bad_request``.

    ``names`` are the fields that it may have; ``purpose`` is of what the form is, for messages: ``a vector``.
    """
    fields: dict[str, str] = {}
    files: list[tuple[str, bytes]] = []
    form = f"The form of {purpose}"

    def on_field(field: Field) -> None:
        name = (field.field_name or b"").decode("utf-8", "replace")
        if name not in names or name in fields:
            known = ", ".join((FILE, *names))
            raise _bad_form(f"{form} has the fields {known}, each once; got {clip(name)!r}.")
        value = field.value or b""
        if len(value) > _MAX_FIELD_BYTES:
            raise _bad_form(
                f"A field of a form has at most {_MAX_FIELD_BYTES} bytes; {name} has {len(value)}."
            )
        fields[name] = value.decode("utf-8", "replace")

    def on_file(file: File) -> None:
        if file.field_name != FILE.encode() or files:
            raise _bad_form(f"{form} has one file, in the field `{FILE}`.")
        file.file_object.seek(0)
        files.append(((file.file_name or b"").decode("utf-8", "replace"), file.file_object.read()))

    # The parser's limits on fields are not for forms of this media type: ours are above.
    config = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}
    try:
        parser = create_form_parser(
            {"Content-Type": content_type.encode("latin-1")}, on_field, on_file, config
        )
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError, TypeError) as error:
        raise _bad_form(f"The form is broken: {clip(str(error))}.") from error
    if not files:
        raise _bad_form(f"{form} needs a file, in the field `{FILE}`.")
    return fields, files[0]


def _bad_form(message: str) -> ApiError:
    return ApiError(ErrorCode.BAD_REQUEST, message)


Tensors = Mapping[str, npt.NDArray[Any]]

_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 512 * 1024
_METADATA: Final = "__metadata__"
_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_PICKLE: Final = re.compile(rb"\x80[\x00-\x05]")
_PICKLED: Final = frozenset({"pt", "pth", "bin", "pkl", "pickle", "ckpt", "joblib"})


class TensorFile(NamedTuple):
    tensors: Tensors
    metadata: Mapping[str, str]


def refuse_pickle(name: str, data: bytes, advice: str) -> None:
    """Raise ``unsupported_vector_format`` for a file that is a pickle, or may be one; ``advice`` is added."""
    ending = name.rpartition(".")[2].lower() if "." in name else ""
    # A safetensors file may begin with the same bytes: they are the length of its header.
    if ending in _PICKLED or (_PICKLE.match(data) and not is_safetensors(data)):
        subject = (
            f"A .{ending} file is a pickle, or may be one" if ending in _PICKLED else "This file is a pickle"
        )
        raise ApiError(
            ErrorCode.UNSUPPORTED_FORMAT,
            f"{subject}, and reading a pickle runs its code: no server accepts one. {advice}",
            FILE,
        )


def is_safetensors(data: bytes) -> bool:
    return data[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def read_safetensors(data: bytes, invalid: ErrorCode) -> TensorFile:
    """Return the content; raises ApiError with code ``invalid`` for a broken file, or ``wrong_dtype``."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > min(_MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise ApiError(
            invalid,
            f"The safetensors header claims {length} bytes, of {len(data)} that the file has; here it has "
            f"at most {_MAX_HEADER_BYTES}.",
            FILE,
        )
    try:
        entries = safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # it has no types
        tensors = {name: _tensor(name, entry) for name, entry in entries}
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        # safetensors allows shapes that numpy refuses: too many dimensions, or huge ones beside an empty one.
        raise ApiError(invalid, f"The safetensors file is broken: {clip(str(error))}.", FILE) from error
    # Valid JSON of texts, since it was accepted.
    header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return TensorFile(tensors, header.get(_METADATA) or {})


def _tensor(name: str, entry: dict[str, Any]) -> npt.NDArray[Any]:
    """Return the array of one entry of ``safetensors.deserialize``; bfloat16 becomes float32."""
    dtype, content = entry["dtype"], bytes(entry["data"])
    if dtype == "BF16":
        return floats_from_bytes("bfloat16", content).reshape(entry["shape"])
    if dtype not in _DTYPES:
        raise ApiError(
            ErrorCode.WRONG_DTYPE,
            f"A tensor's dtype must be one of {', '.join(_DTYPES)}, BF16; {clip(name)!r} has "
            f"{clip(str(dtype))}.",
            FILE,
        )
    return np.frombuffer(content, _DTYPES[dtype]).reshape(entry["shape"])
