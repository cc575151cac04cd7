"""Views that may be edited in place while gradients are recorded.

Torch refuses edits of what ``unbind``, ``split`` and their like return, because such a call makes several
views at once. A view of the same numbers that was made alone may be edited. So a property's ``preprocess``
may return ``list(value.unbind(2))``, and ``heads[3][:] = 0`` edits the model; ``eproperty`` calls this on
what ``preprocess`` gives.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from nnsight_engine.core.trees import map_tensors

T = TypeVar("T")

_creation = torch._C._autograd._get_creation_meta
_ONE_OF_SEVERAL = torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE


def editable(value: T) -> T:
    """Return ``value`` with each view that could not be edited replaced by one of its memory that can."""
    return map_tensors(value, _made_alone)


def _made_alone(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor._base
    if base is None or not tensor.requires_grad or _creation(tensor) != _ONE_OF_SEVERAL:
        return tensor
    return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
