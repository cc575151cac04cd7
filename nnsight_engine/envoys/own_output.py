"""``model.logits`` is a tensor, and ``model.logits.output`` the same tensor.

Scripts also read and assign logits and sampled tokens as the output of a module. So ``torch.Tensor`` has an
``output`` that exists only on tensors that were read as such a value; these keep their class and identity, on
which gradients depend.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_NAME: Final = "output"
_OWNERS: Final = WeakTensorKeyDictionary()
"""By tensor: a weak reference to the envoy of the model, and the attribute of it that was read."""


class _OwnOutput:
    def __get__(self, tensor: torch.Tensor | None, owner: type | None = None) -> Any:
        if tensor is None:
            return self
        own = tensor.__dict__
        if _NAME in own:
            return own[_NAME]
        if tensor in _OWNERS:
            return tensor
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {_NAME!r}", name=_NAME)

    def __set__(self, tensor: torch.Tensor, value: Any) -> None:
        if tensor in _OWNERS:
            reference, name = _OWNERS[tensor]
            setattr(reference(), name, value)
        else:
            tensor.__dict__[_NAME] = value

    def __delete__(self, tensor: torch.Tensor) -> None:
        del tensor.__dict__[_NAME]


def with_own_output(tensor: torch.Tensor, owner: object, name: str) -> torch.Tensor:
    """Return ``tensor``, the value of ``owner.<name>``; assigning its ``output`` assigns that attribute."""
    if isinstance(tensor, torch.Tensor):
        _OWNERS[tensor] = (weakref.ref(owner), name)
    return tensor


def install() -> None:
    setattr(torch.Tensor, _NAME, _OwnOutput())
