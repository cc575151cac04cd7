"""Dtype conversion that raises an error where a finite number would overflow to infinity."""

from __future__ import annotations

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
