"""Views that may be edited in place while gradients are recorded.

Torch rejects in-place edits of the results of ``unbind``, ``split`` and similar functions, because such a
call returns several views at once. A view of the same memory that was created alone may be edited.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from nnsight_engine.core.trees import map_tensors

T = TypeVar("T")

_creation = torch._C._autograd._get_creation_meta
_ONE_OF_SEVERAL = torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE


def editable(value: T) -> T:
    return map_tensors(value, _as_single_view)


def _as_single_view(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor._base
    if base is None or not tensor.requires_grad or _creation(tensor) != _ONE_OF_SEVERAL:
        return tensor
    return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
