"""Routers of experts on a CPU, where vLLM 0.32 without groups lacks sigmoids and correction biases.

MiniMax-M2 ends the engine; Ernie 4.5 MoE loses its bias without an error. Such choices use one group of all.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter, _grouped_topk

_ROUTING: Final = CPURouter._compute_routing  # noqa: SLF001 - routers have no public seam
_SCORES: Final = frozenset({"softmax", "sigmoid"})


def choose(
    router: CPURouter,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights, float32, and the ids, int32, of each token's experts, ``[tokens, top_k]``."""
    is_lacking = (
        not router.use_grouped_topk
        and router.custom_routing_function is None
        and router.scoring_func in _SCORES
        and (router.scoring_func == "sigmoid" or router.e_score_correction_bias is not None)
    )
    chosen: tuple[torch.Tensor, torch.Tensor]
    if is_lacking:
        chosen = _grouped_topk(
            router_logits,
            router.top_k,
            router.renormalize,
            1,
            1,
            router.scoring_func,
            router.routed_scaling_factor,
            router.e_score_correction_bias,
        )
    else:
        chosen = _ROUTING(router, hidden_states, router_logits, indices_type, **others)
    return chosen


def mend_router() -> None:
    CPURouter._compute_routing = choose  # noqa: SLF001 - as above
