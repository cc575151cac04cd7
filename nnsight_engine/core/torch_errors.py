"""Explanations of torch's errors in blocks: what such an error usually means in a trace, and the remedy."""

from __future__ import annotations

from typing import Final

from nnsight_engine.core.gradients import ASK, ON_VLLM

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
    if isinstance(error, RuntimeError | IndexError) and not hasattr(error, "__notes__"):
        text = str(error)
        for part, note in _NOTES.items():
            if part in text:
                error.add_note(note)
