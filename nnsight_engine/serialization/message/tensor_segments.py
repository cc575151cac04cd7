"""The tensors of a message as one safetensors file, with each byte copied only once on either side.

safetensors' own functions copy two or three times. A reader copies each tensor, so that a small one does not
keep the whole message alive; one of at least half of the data shares writable, aligned memory instead.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import torch

from nnsight_engine.core.tensor_bytes import flat_bytes
from nnsight_engine.serialization.errors import DecodeError

_LENGTH: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 16
"""In bytes, as memory allocators align; also the size of torch's largest number type."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of safetensors' own readers."""
_NAMES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
DTYPES: Final = frozenset(_NAMES)
"""Dtypes that every safetensors reader supports; tensors of other dtypes are sent as raw bytes."""
_BY_NAME: Final = {name: dtype for dtype, name in _NAMES.items()}


class _SegmentHeader(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_HEADER: Final = msgspec.json.Decoder(dict[str, _SegmentHeader])


def write_segments(tensors: Mapping[str, torch.Tensor], start: int = 0) -> list[bytes | memoryview]:
    """Return pieces that share the tensors' memory; ``start`` bytes come before them, for alignment."""
    if not tensors:
        return []
    header, pieces, at = {}, list[bytes | memoryview](), 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = _SegmentHeader(_NAMES[tensor.dtype], list(tensor.shape), (at, end))
        pieces.append(flat_bytes(tensor).numpy().data)
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-(start + _LENGTH.size + len(text)) % _ALIGNMENT)
    return [_LENGTH.pack(len(text)), text, *pieces]


def read_segments(view: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors; raise a ``DecodeError`` unless they cover the data without gaps or overlaps."""
    if not view:
        return {}
    (length,) = _LENGTH.unpack_from(view) if len(view) >= _LENGTH.size else (len(view),)
    if length > min(_MAX_HEADER_BYTES, len(view) - _LENGTH.size):
        raise DecodeError("the message is broken: the header of its tensors is longer than they are")
    try:
        entries = _HEADER.decode(view[_LENGTH.size : _LENGTH.size + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"the message is broken: its tensors cannot be read ({error})") from error
    data = view[_LENGTH.size + length :]
    at = 0  # overlapping tensors could take far more memory than was sent
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offsets):
        start, end = entry.data_offsets
        if start != at or not start <= end <= len(data):
            raise DecodeError("the message is broken: its tensors are not one after another")
        at = end
    if at != len(data):
        raise DecodeError("the message is broken: it has bytes behind its tensors")
    return {name: _tensor(entry, data) for name, entry in entries.items()}


def _tensor(entry: _SegmentHeader, data: memoryview) -> torch.Tensor:
    dtype = _BY_NAME.get(entry.dtype)
    start, end = entry.data_offsets
    if dtype is None or not all(0 <= size < 2**62 for size in entry.shape):
        raise DecodeError(f"the message is broken: a tensor has the type {entry.dtype!r} and {entry.shape}")
    if math.prod(entry.shape) * dtype.itemsize != end - start or start == end:
        raise DecodeError("the message is broken: a tensor has another size than its shape says")
    found = np.frombuffer(data[start:end], np.uint8)
    if found.flags.writeable and 2 * found.nbytes >= len(data) and found.ctypes.data % _ALIGNMENT == 0:
        return torch.from_numpy(found).view(dtype).reshape(entry.shape)
    tensor = torch.empty(entry.shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = found
    return tensor


__all__ = ["DTYPES", "read_segments", "write_segments"]
