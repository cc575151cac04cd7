"""What replaces kernels of vLLM on a CPU: rotary positions and routers of experts."""

from __future__ import annotations

import itertools

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from nnsight_engine.vllm_backend.steps.faults import choose, rotate

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 12, 4, 2, 32
EXPERTS, TOP_K = 8, 3
LOGITS = torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(2))
SCORES = {"softmax": LOGITS.softmax(-1), "sigmoid": LOGITS.sigmoid()}


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("is_latent", [False, True])
def test_heads_of_their_own_axis_are_rotated_as_flat_ones(*, is_neox_style: bool, is_latent: bool) -> None:
    with set_current_vllm_config(VllmConfig()):
        module = RotaryEmbedding(HEAD_DIM, HEAD_DIM, 64, 10_000.0, is_neox_style, torch.float32)
    query, key = torch.randn(TOKENS, HEADS, HEAD_DIM), torch.randn(TOKENS, KV_HEADS, HEAD_DIM)
    if is_latent:  # rotates the last columns of each query, and one key for all heads
        query = torch.randn(TOKENS, HEADS, 3 * HEAD_DIM)[..., -HEAD_DIM:]
        key = torch.randn(TOKENS, 3 * HEAD_DIM)[:, -HEAD_DIM:].unsqueeze(1)
    positions = torch.arange(TOKENS)
    flat = rotate(module, positions, query.flatten(1).clone(), key.flatten(1).clone())
    for one, other in zip(rotate(module, positions, query, key), flat, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.flatten(1), other)


@pytest.mark.parametrize(
    ("scoring", "has_bias", "renormalize", "scale"),
    itertools.product(SCORES, (False, True), (False, True), (1.0, 2.5)),
)
def test_the_best_experts_get_their_scores_as_weights(
    scoring: str, has_bias: bool, renormalize: bool, scale: float
) -> None:
    is_vllms_own = scoring == "softmax" and not has_bias
    router = CPURouter(
        TOP_K,
        EXPERTS,
        scoring_func=scoring,
        renormalize=renormalize,
        # vLLM scales the outputs of these instead.
        routed_scaling_factor=1.0 if is_vllms_own else scale,
        e_score_correction_bias=BIAS if has_bias else None,
    )
    weights, ids = choose(router, LOGITS, LOGITS, None)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    scores = SCORES[scoring]
    expected = (scores + BIAS if has_bias else scores).topk(TOP_K).indices
    assert torch.equal(ids.sort().values, expected.sort().values.int())
    wanted = scores.gather(-1, ids.long())
    if renormalize:
        wanted = wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, wanted * (1.0 if is_vllms_own else scale))


def test_groups_and_functions_of_a_model_s_own_stay_vllms() -> None:
    given = torch.ones(len(LOGITS), TOP_K), torch.zeros(len(LOGITS), TOP_K)
    for router in (
        CPURouter(
            TOP_K, EXPERTS, use_grouped_topk=True, num_expert_group=4, topk_group=2, scoring_func="sigmoid"
        ),
        CPURouter(TOP_K, EXPERTS, custom_routing_function=lambda **_: given, scoring_func="sigmoid"),
    ):
        vllms = CPURouter._compute_routing(router, LOGITS, LOGITS, None)
        for one, other in zip(choose(router, LOGITS, LOGITS, None), vllms, strict=True):
            assert torch.equal(one, other)
