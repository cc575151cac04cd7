"""Conversion of tensors and arrays to message segments: contiguous values in host memory, one per tensor."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

from nnsight_engine.core.tensor_bytes import flat_bytes
from nnsight_engine.serialization.errors import DecodeError
from nnsight_engine.serialization.message import tensor_segments

DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_MAX_DIMENSIONS = 64
_ARRAY_DTYPE = re.compile(r"[<>|=]?[biufcSUmM?]\d{0,6}(\[\w{1,8}\])?")


def unsendable(tensor: torch.Tensor) -> str | None:
    """Return why the tensor cannot be serialized, or None if it can."""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        return "it is of a subclass of Tensor; send tensor.as_subclass(torch.Tensor)"
    if tensor.layout is not torch.strided:
        return "it is sparse; send tensor.to_dense()"
    if tensor.is_quantized:
        return "it is quantized; send tensor.dequantize()"
    if tensor.is_nested:
        return "it is nested; send tensor.unbind()"
    return None


def segment_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values to send; None if there are none, as for an empty tensor or one on the meta device."""
    if tensor.is_meta or not tensor.numel():
        return None
    values = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if values.dtype not in tensor_segments.DTYPES:
        values = flat_bytes(values)
    return values


def tensor_of(
    segment: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Return a tensor on ``device``; raise a ``DecodeError`` if the segment has another size."""
    _check_shape(shape)
    if segment is None:
        if device.type != "meta" and 0 not in shape:
            raise DecodeError(f"a tensor of shape {shape} has no values")
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * int(dtype.itemsize)
    if num_bytes != segment.nbytes or not num_bytes:
        raise DecodeError(
            f"a tensor of shape {shape} and {dtype} has {num_bytes} bytes, not {segment.nbytes}"
        )
    values = segment if segment.dtype is dtype else segment.reshape(-1).view(torch.uint8).view(dtype)
    return values.reshape(shape).to(device)


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) > _MAX_DIMENSIONS or any(size < 0 or size >= 2**62 for size in shape):
        raise DecodeError("a tensor has an impossible shape")


def array_bytes(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    if not array.nbytes:
        return None
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy())


def array_of(segment: torch.Tensor | None, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return an array; raise a ``DecodeError`` for an unknown dtype or a segment of another size."""
    if not _ARRAY_DTYPE.fullmatch(dtype):
        raise DecodeError(f"an array has the type {dtype!r}, which cannot travel")
    _check_shape(shape)
    parsed = np.dtype(dtype)
    num_bytes = math.prod(shape) * parsed.itemsize
    num_sent = 0 if segment is None else segment.nbytes
    if num_bytes != num_sent:
        raise DecodeError(f"an array of shape {shape} and {parsed} has {num_bytes} bytes, not {num_sent}")
    if segment is None or not num_bytes:
        if 0 not in shape:  # zero-length text, for which numpy would allocate memory
            raise DecodeError(f"an array of shape {shape} has no values")
        return np.empty(shape, parsed)
    array: np.ndarray[Any, Any] = segment.reshape(-1).view(torch.uint8).numpy().view(parsed).reshape(shape)
    return array
