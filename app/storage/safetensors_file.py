"""Writes safetensors directly from their bytes; the library's own writer takes raw memory addresses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nnsight_engine.plans.collect.results import TensorResult

_DTYPES: Final = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
}
_ALIGNMENT: Final = 8
_LENGTH_BYTES: Final = 8


def layout(tensors: Mapping[str, TensorResult]) -> tuple[bytes, list[str]]:
    """Return the bytes before the data, and the order of keys; ValueError for a wrong dtype or shape."""
    # Wide types first, so that every tensor starts at a multiple of its item size.
    order = sorted(tensors, key=lambda key: (-_code_and_size(tensors[key])[1], key))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key in order:
        tensor = tensors[key]
        code, _ = _code_and_size(tensor)
        end = offset + len(tensor.data)
        header[key] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, order


def write(path: Path, head: bytes, tensors: Mapping[str, TensorResult], order: list[str]) -> None:
    """Write a file atomically; ``head`` and ``order`` come from ``layout``."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("xb") as file:
            file.write(head)
            for key in order:
                file.write(tensors[key].data)
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _code_and_size(tensor: TensorResult) -> tuple[str, int]:
    known = _DTYPES.get(tensor.dtype)
    if known is None:
        raise ValueError(f"a stored tensor's dtype must be one of {', '.join(_DTYPES)}, got {tensor.dtype!r}")
    num_bytes = known[1]
    for size in tensor.shape:
        num_bytes *= size
    if num_bytes != len(tensor.data):
        raise ValueError(
            f"a {tensor.dtype} tensor of shape {tensor.shape} has {num_bytes} bytes, got {len(tensor.data)}"
        )
    return known
