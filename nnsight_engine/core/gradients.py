"""Gradients in blocks: ``tensor.requires_grad = True`` for any tensor (torch: leaves only), and advice.

The advice says what an error of torch's usually means in a trace, and the remedy.
"""

from __future__ import annotations

from typing import Any, Final

import torch

ON_VLLM: Final = (
    "vLLM keeps no graph of the model's run: use LanguageModel, here or on a server with --local-engine"
)
ASK: Final = (
    "call hidden.requires_grad_(True) when you read a value, before the model continues with it, and not "
    "inside torch.no_grad()"
)


def set_requires_grad(value: Any, owner: Any) -> None:
    """Assign ``owner.requires_grad``; True is also allowed for a tensor that is no leaf."""
    if value is True and isinstance(owner, torch.Tensor) and not owner.is_leaf:
        owner.requires_grad_()
    else:
        owner.requires_grad = value


class _NoLeaf:
    """A proxy of a tensor that is not a leaf, as target of an assignment to its ``requires_grad``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def requires_grad(self) -> bool:
        return self._tensor.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: Any) -> None:
        set_requires_grad(value, self._tensor)


def asked_for_gradients(owner: Any) -> Any:
    """Return the object on which ``requires_grad`` is to be assigned in place of the owner."""
    return _NoLeaf(owner) if isinstance(owner, torch.Tensor) and not owner.is_leaf else owner


def missing_graph_reason(tensor: torch.Tensor) -> str | None:
    """Return why torch keeps no graph of a tensor, and the remedy; None if it does."""
    if tensor.requires_grad:
        return None
    if tensor.is_inference():
        return f"it was computed in inference mode. Leave torch.inference_mode(); {ON_VLLM}"
    if not torch.is_grad_enabled():
        return (
            "gradients are switched off here. Leave torch.no_grad(), or compute what needs them under `with "
            f"torch.enable_grad():`; {ON_VLLM}"
        )
    return f"nothing that it was computed from requires gradients. Here {ASK}; {ON_VLLM}"


_OF_GRADIENTS: Final = "For gradients in a trace: "
_OF_BLOCKS: Final = "If this is a part of a decoder block's output: "

_NOTES: Final = {
    "you can only change requires_grad flags of leaf variables": (
        f"{_OF_GRADIENTS}call tensor.requires_grad_(True) to request them, tensor.detach() to stop them."
    ),
    "Setting requires_grad=True on inference tensor": f"{_OF_GRADIENTS}{ON_VLLM}.",
    "does not require grad and does not have a grad_fn": f"{_OF_GRADIENTS}{ASK}; {ON_VLLM}.",
    "too many indices for tensor of dimension": (
        f"{_OF_BLOCKS}blocks return one tensor, [rows, tokens, width], and no longer a tuple that begins "
        "with it. Write `output` for what is `output[0]` in older scripts. In vLLM it has no rows, [tokens, "
        "width]."
    ),
}
"""The note for each error, by a part of its text."""


def explain(error: BaseException) -> None:
    """Add a note to an error of torch that says what it usually means in a trace."""
    if isinstance(error, RuntimeError | IndexError) and not hasattr(error, "__notes__"):
        text = str(error)
        for part, note in _NOTES.items():
            if part in text:
                error.add_note(note)
