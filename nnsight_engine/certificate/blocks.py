"""The blocks of a certificate: the same code on ``LanguageModel`` and on ``VLLM``.

A change is added at every position but the first, since the same addition to all keys would change no
attention. At ``logits`` it is added at the last position, the only one that vLLM computes. Writes and skips
return the logits of the last position, float32 ``[vocabulary]``. Options are those of ``trace``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nnsight_engine.certificate.measurements import LOGITS
from nnsight_engine.core.saves import save


def read(model: Any, prompt: Any, names: Sequence[str], **options: Any) -> dict[str, torch.Tensor]:
    """Return points, float32 ``[tokens, *shape]``; patterns are ``[heads, tokens, keys]``.

    States and logits are those at the last position only, states without an axis for it.
    """
    with model.trace(prompt, **options):
        values: dict[str, torch.Tensor] = save({})
        for name in names:
            value = model.points[name]
            values[name] = value[..., -1:, :].clone() if name == LOGITS else value.clone()
    is_batched = isinstance(prompt, torch.Tensor)  # as on ``LanguageModel``
    return {name: _on_host(value[0] if is_batched else value) for name, value in values.items()}


def write_in_place(model: Any, prompt: Any, name: str, change: torch.Tensor, **options: Any) -> torch.Tensor:
    axis = -1 - change.ndim
    with model.trace(prompt, **options):
        value = model.points[name]
        first = value.shape[axis] - 1 if name == LOGITS else 1
        value.narrow(axis, first, value.shape[axis] - first).add_(change.to(value))
        logits = model.points[LOGITS][..., -1, :].clone().save()
    return _on_host(logits).flatten()


def assign(model: Any, prompt: Any, name: str, change: torch.Tensor, **options: Any) -> torch.Tensor:
    axis = -1 - change.ndim
    with model.trace(prompt, **options):
        value = model.points[name].clone()
        first = value.shape[axis] - 1 if name == LOGITS else 1
        value.narrow(axis, first, value.shape[axis] - first).add_(change.to(value))
        model.points[name] = value
        logits = model.points[LOGITS][..., -1, :].clone().save()
    return _on_host(logits).flatten()


def num_returned(model: Any, prompt: Any, layer: int) -> int:
    """Return the number of items that a transformers layer returns; 0 if it returns one tensor."""
    with model.trace(prompt):
        output = model.layers[layer].output
        number: int = save(len(output) if isinstance(output, tuple) else 0)
    return number


def skip(model: Any, prompt: Any, layer: int, *, num_items: int = 0, **options: Any) -> torch.Tensor:
    """Skip a layer, whose output is then its input.

    The input takes the place of ``num_items`` items, of which all but the first are None; 0 for the tensor
    alone.
    """
    with model.trace(prompt, **options):
        block = model.layers[layer]
        block.skip((block.input, *[None] * (num_items - 1)) if num_items else block.input)
        logits = model.points[LOGITS][..., -1, :].clone().save()
    return _on_host(logits).flatten()


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.detach().float().cpu()
