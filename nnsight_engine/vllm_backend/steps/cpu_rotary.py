"""Rotary embedding on a CPU, where vLLM 0.32 has a fault; such calls use vLLM's implementation in torch.

Its kernel takes the second-last stride as the distance between tokens. In ``[tokens, heads, head_dim]``
(LFM2, latent attention) most tokens are not rotated, and the first ones several times.
"""

from __future__ import annotations

from typing import Final

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_KERNEL: Final = RotaryEmbedding.forward_cpu
_FLAT_DIM: Final = 2


def rotate(
    module: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    method = RotaryEmbedding.forward_native if query.dim() > _FLAT_DIM else _KERNEL
    rotated: tuple[torch.Tensor, torch.Tensor | None] = method(module, positions, query, key)
    return rotated


def mend_rotary_embedding() -> None:
    """Replace vLLM's method in this process; modules that exist already keep theirs."""
    RotaryEmbedding.forward_cpu = rotate
