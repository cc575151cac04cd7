"""Values put into another dtype: numbers beyond it are an error, never infinity."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def narrowed(value: torch.Tensor, dtype: torch.dtype, *, what: str) -> torch.Tensor:
    """Return a tensor in another dtype; the same tensor where it has that already.

    What is infinite already stays so. Only a dtype that holds smaller numbers than the value's is looked
    at, for which a GPU is waited for.

    Args:
        value: The tensor.
        dtype: The dtype.
        what: What asks for it, for the error: "a cache keeps values in float16".

    Raises:
        ValueError: A finite number would become infinite.
    """
    narrow = value.to(dtype)
    if not (_has_range(value.dtype) and _has_range(dtype)) or isinstance(narrow, FakeTensor):
        return narrow
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(value.dtype).max and narrow.device.type != "meta":
        beyond = narrow.isinf() & value.isfinite()
        if bool(beyond.any()):
            raise ValueError(
                f"{what}, whose largest number is {largest:g}, and a number of the value is beyond that; use "
                "bfloat16 or float32, or smaller numbers"
            )
    return narrow


def fitted(value: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Return a value in the dtype and on the device of the model's own, whose place it takes.

    Raises:
        ValueError: A finite number would become infinite.
    """
    return narrowed(value, current.dtype, what=f"the model goes on in {current.dtype}").to(current)


def _has_range(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point
