"""Tensors as little-endian bytes, their wire format; numpy reads two-byte floats as 16-bit integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}


def tensor_from_bytes(dtype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    """Return a tensor that owns a copy of ``data``; ``dtype`` is a key of ``DTYPES``."""
    if not data:
        # torch cannot reinterpret an empty tensor.
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    raw = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return raw.view(DTYPES[dtype]).reshape(tuple(shape))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's content as a flat uint8 tensor in row-major order; a view if it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    # A tensor of one element is contiguous whatever its stride, and view(dtype) may reject that stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().to("cpu").contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    data: bytes = tensor.numpy().tobytes()
    return data
