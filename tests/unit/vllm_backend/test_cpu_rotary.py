"""Queries and keys by head are rotated as they are when their heads lie side by side."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from nnsight_engine.vllm_backend.steps.cpu_rotary import rotate

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 12, 4, 2, 32

Rotated = tuple[torch.Tensor, torch.Tensor | None]


def _module(*, is_neox_style: bool) -> RotaryEmbedding:
    with set_current_vllm_config(VllmConfig()):
        return RotaryEmbedding(HEAD_DIM, HEAD_DIM, 64, 10_000.0, is_neox_style, torch.float32)


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_heads_of_their_own_axis_are_rotated_as_flat_ones(is_neox_style: bool) -> None:
    module = _module(is_neox_style=is_neox_style)
    positions = torch.arange(TOKENS)
    query, key = torch.randn(TOKENS, HEADS, HEAD_DIM), torch.randn(TOKENS, KV_HEADS, HEAD_DIM)
    flat = rotate(module, positions, query.flatten(1).clone(), key.flatten(1).clone())
    by_head = rotate(module, positions, query, key)
    _assert_same(by_head, flat)


def test_a_part_of_each_head_is_rotated() -> None:
    """Latent attention rotates the last columns of each query, and one key for all heads."""
    module = _module(is_neox_style=False)
    positions = torch.arange(TOKENS)
    query, key = torch.randn(TOKENS, HEADS, 3 * HEAD_DIM), torch.randn(TOKENS, 3 * HEAD_DIM)
    part, key_part = query[..., -HEAD_DIM:], key[:, -HEAD_DIM:].unsqueeze(1)
    flat = rotate(module, positions, part.flatten(1).clone(), key_part.flatten(1).clone())
    by_head = rotate(module, positions, part, key_part)
    _assert_same(by_head, flat)


def _assert_same(by_head: Rotated, flat: Rotated) -> None:
    for one, other in zip(by_head, flat, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.flatten(1), other)
