"""Experts are chosen on a CPU by the scores that a model has, with the bias that it has."""

from __future__ import annotations

import itertools

import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from nnsight_engine.vllm_backend.steps.cpu_router import choose

TOKENS, EXPERTS, TOP_K = 40, 8, 3
LOGITS = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(2))
SCORES = {"softmax": LOGITS.softmax(-1), "sigmoid": LOGITS.sigmoid()}


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
    grouped = CPURouter(
        TOP_K, EXPERTS, use_grouped_topk=True, num_expert_group=4, topk_group=2, scoring_func="sigmoid"
    )
    for one, other in zip(
        choose(grouped, LOGITS, LOGITS, None),
        CPURouter._compute_routing(grouped, LOGITS, LOGITS, None),
        strict=True,
    ):
        assert torch.equal(one, other)
    given = torch.ones(TOKENS, TOP_K), torch.zeros(TOKENS, TOP_K)
    own = CPURouter(TOP_K, EXPERTS, custom_routing_function=lambda **_: given, scoring_func="sigmoid")
    weights, ids = choose(own, LOGITS, LOGITS, None)
    assert torch.equal(weights, given[0])
    assert torch.equal(ids, given[1].int())
