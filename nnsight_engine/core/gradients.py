"""What blocks may say of gradients: ``tensor.requires_grad = True`` of any tensor, and why there are none.

Torch lets the attribute be set on leaves alone; ``requires_grad_(True)`` says the same of any tensor. Blocks,
wherever they run, have their assignments go through here.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_ON_VLLM: Final = (
    "vLLM keeps no graph of the model's run: use LanguageModel, here or on a server with --local-engine"
)
_ASK: Final = (
    "say hidden.requires_grad_(True) of a value when you read it, before the model goes on with it, and not "
    "inside torch.no_grad()"
)
_TORCH_SAYS: Final = {
    "you can only change requires_grad flags of leaf variables": (
        "say tensor.requires_grad_(True) to ask for them, tensor.detach() to cut them off"
    ),
    "Setting requires_grad=True on inference tensor": _ON_VLLM,
    "does not require grad and does not have a grad_fn": f"{_ASK}; {_ON_VLLM}",
}


def set_requires_grad(value: Any, owner: Any) -> None:
    """Assign ``owner.requires_grad``."""
    if value is True and isinstance(owner, torch.Tensor) and not owner.is_leaf:
        owner.requires_grad_()
    else:
        owner.requires_grad = value


class _NoLeaf:
    """Stands for a tensor that is no leaf, where its ``requires_grad`` is assigned."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def requires_grad(self) -> bool:
        return self._tensor.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: Any) -> None:
        set_requires_grad(value, self._tensor)


def asked_for_gradients(owner: Any) -> Any:
    """Return that whose ``requires_grad`` can be assigned in place of the owner's."""
    return _NoLeaf(owner) if isinstance(owner, torch.Tensor) and not owner.is_leaf else owner


def why_no_graph(tensor: torch.Tensor) -> str | None:
    """Return why there are no gradients of a tensor, and what to do; None if there are."""
    if tensor.requires_grad:
        return None
    if tensor.is_inference():
        return f"it was computed in inference mode. Leave torch.inference_mode(); {_ON_VLLM}"
    if not torch.is_grad_enabled():
        return (
            "gradients are switched off here. Leave torch.no_grad(), or compute what needs them under `with "
            f"torch.enable_grad():`; {_ON_VLLM}"
        )
    return f"nothing that it was computed from requires gradients. Here {_ASK}; {_ON_VLLM}"


def explain(error: BaseException) -> None:
    """Add what to do to an error of torch's about gradients that does not say it."""
    if isinstance(error, RuntimeError) and not hasattr(error, "__notes__"):
        text = str(error)
        for part, remedy in _TORCH_SAYS.items():
            if part in text:
                error.add_note(f"For gradients in a trace: {remedy}.")
