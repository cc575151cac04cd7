"""Conversion of tensors: to another dtype, and to little-endian bytes, their wire format.

A finite number that would overflow to infinity raises an error. numpy reads two-byte floats as 16-bit
integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor


def narrowed(value: torch.Tensor, dtype: torch.dtype, *, what: str) -> torch.Tensor:
    """Return a tensor in another dtype, itself if it has it; ValueError if a finite number overflowed.

    Values are checked only if the new dtype's range is smaller; on a GPU this check synchronizes.
    """
    narrow = value.to(dtype)
    if not (_has_range(value.dtype) and _has_range(dtype)) or isinstance(narrow, FakeTensor):
        return narrow
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(value.dtype).max and narrow.device.type != "meta":
        beyond = narrow.isinf() & value.isfinite()
        if bool(beyond.any()):
            raise ValueError(
                f"{what}, whose largest number is {largest:g}, and the value has a larger one; use bfloat16 "
                "or float32, or smaller numbers"
            )
    return narrow


def fitted(value: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Return a value in dtype and on the device of the model's value that it replaces, see ``narrowed``."""
    return narrowed(value, current.dtype, what=f"the model continues in {current.dtype}").to(current)


def _has_range(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


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


_WEIGHTS_HASHED: Final = 64
"""Of each parameter: enough to tell fine-tuned weights apart, without reading all of them."""


def hash_of_weights(config: str, module: torch.nn.Module) -> str:
    """Return a hash over a model's ``config`` and a sample of each parameter."""
    digest = hashlib.sha256(config.encode())
    for name, parameter in module.named_parameters():
        flat: Any = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // _WEIGHTS_HASHED)].contiguous().cpu()
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
