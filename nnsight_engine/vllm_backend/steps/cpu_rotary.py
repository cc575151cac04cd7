"""Rotary embedding on a CPU, where vLLM 0.32 has a fault.

Its CPU kernel takes the second-last stride of queries and keys as the distance between tokens. That is right
for ``[tokens, heads * head_dim]``. LFM2 and the models with latent attention (DeepSeek, GLM-4 MoE Lite) pass
``[tokens, heads, head_dim]``, where it is the distance between heads: most tokens are not rotated, and the
first ones several times.

Safeguard: such calls use vLLM's implementation in torch. Compiled models use it anyway.
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
    """Return queries and keys rotated by their positions, in the shapes that they have."""
    method = RotaryEmbedding.forward_native if query.dim() > _FLAT_DIM else _KERNEL
    rotated: tuple[torch.Tensor, torch.Tensor | None] = method(module, positions, query, key)
    return rotated


def mend_rotary_embedding() -> None:
    """Replace vLLM's method in this process; modules that exist already keep theirs."""
    RotaryEmbedding.forward_cpu = rotate
