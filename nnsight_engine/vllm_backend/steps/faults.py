"""Faults of vLLM 0.32 that give wrong values, or end the engine, mended in the worker.

Rotary embedding on a CPU: its kernel takes the second-last stride as the distance between tokens. In
``[tokens, heads, head_dim]`` (LFM2, latent attention) most tokens are not rotated, and the first ones several
times. Such calls use vLLM's implementation in torch.

Routers of experts on a CPU lack sigmoids and correction biases without groups: MiniMax-M2 ends the engine;
Ernie 4.5 MoE loses its bias without an error. Such choices use one group of all.

Gemma 3n of text alone (``Gemma3nForCausalLM``) lacks its embeddings per layer. The bias of Phi-MoE's
unembedding is loaded and not added.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter, _grouped_topk
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_KERNEL: Final = RotaryEmbedding.forward_cpu
_FLAT_DIM: Final = 2


def rotate(
    module: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In place of ``RotaryEmbedding.forward_cpu``, whose kernel is wrong for ``[tokens, heads, dim]``."""
    method = RotaryEmbedding.forward_native if query.dim() > _FLAT_DIM else _KERNEL
    rotated: tuple[torch.Tensor, torch.Tensor | None] = method(module, positions, query, key)
    return rotated


def mend_rotary_embedding() -> None:
    """Replace vLLM's method in this process; modules that exist already keep theirs."""
    RotaryEmbedding.forward_cpu = rotate


_ROUTING: Final = CPURouter._compute_routing  # noqa: SLF001 - routers have no public seam
_SCORES: Final = frozenset({"softmax", "sigmoid"})


def choose(
    router: CPURouter,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of ``CPURouter._compute_routing``, which lacks sigmoids and correction biases without groups:
    those use one group of all experts.

    Returns the weights, float32, and the ids, int32, of each token's experts, ``[tokens, top_k]``.
    """
    is_unsupported_by_vllm = (
        not router.use_grouped_topk
        and router.custom_routing_function is None
        and router.scoring_func in _SCORES
        and (router.scoring_func == "sigmoid" or router.e_score_correction_bias is not None)
    )
    chosen: tuple[torch.Tensor, torch.Tensor]
    if is_unsupported_by_vllm:
        chosen = _grouped_topk(
            router_logits,
            router.top_k,
            router.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=router.scoring_func,
            routed_scaling_factor=router.routed_scaling_factor,
            e_score_correction_bias=router.e_score_correction_bias,
        )
    else:
        chosen = _ROUTING(router, hidden_states, router_logits, indices_type, **others)
    return chosen


def mend_router() -> None:
    CPURouter._compute_routing = choose  # noqa: SLF001 - as above


_GEMMA_3N: Final = "Gemma3nForCausalLM"
_INPUTS: Final = "per_layer_inputs"


def supply_inputs_per_layer(model: nn.Module, max_num_tokens: int) -> None:
    """Have Gemma 3n compute its embeddings per layer in each step; does nothing for other models.

    They are written to memory that stays, as CUDA graphs need.
    """
    if type(model).__name__ != _GEMMA_3N:
        return
    decoder: Any = model.model
    config, weight = decoder.config, decoder.embed_tokens.weight
    sizes = (config.num_hidden_layers, config.hidden_size_per_layer_input)
    buffer = torch.zeros(max_num_tokens, *sizes, dtype=weight.dtype, device=weight.device)
    forward = model.forward

    def forward_with_inputs(input_ids: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if input_ids is not None and kwargs.get(_INPUTS) is None:
            inputs = buffer[: len(input_ids)]
            inputs.copy_(decoder.get_per_layer_input_embeddings(input_ids).view_as(inputs))
            kwargs[_INPUTS] = inputs
        return forward(input_ids, *args, **kwargs)

    model.forward = forward_with_inputs


_PHI_MOE: Final = "PhiMoEForCausalLM"


def add_unembedding_bias(model: nn.Module) -> None:
    if type(model).__name__ == _PHI_MOE:
        type(model).compute_logits = _compute_logits  # type: ignore[attr-defined]


def _compute_logits(model: Any, hidden_states: torch.Tensor) -> Any:
    return model.logits_processor(model.lm_head, hidden_states, model.lm_head.bias)
