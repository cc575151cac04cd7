"""Tables of decoders with mixtures of experts, and with attention that compresses keys and values (MLA).

Experts have no neurons in common, so that no module has them; blocks without experts have their own.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from nnsight_engine.core.model_spec import (
    EXPERT_WEIGHTS,
    EXPERTS,
    KEYS,
    LATENT,
    QUERIES,
    ROUTED,
    ROUTER,
    SHARED,
    VALUES,
)
from nnsight_engine.families.dense import ATTENTION, LLAMA, TRANSFORMERS_ATTENTION, TRANSFORMERS_LLAMA
from nnsight_engine.families.layout import Place, attention_leaves, mlp_leaves, without

_LATENT: Final = {LATENT: Place("self_attn.kv_a_layernorm", "output")}
_REORDERED: Final = frozenset({QUERIES, KEYS})
"""Leaves of Llama 4 whose numbers vLLM orders differently."""


def engine_experts(mlp: str, *, gate: str = "gate", has_shared: bool = False) -> dict[str, Place]:
    """Return the leaves, in vLLM, of an MLP with, at least in some layers, experts.

    ``gate`` is the module of the router's logits, below the MLP; ``has_shared``: what shared experts add is a
    value in transformers, too.
    """
    inner = f"{mlp}.experts.inner"  # modules that ``hooks`` adds
    return mlp_leaves(mlp, gate_up="gate_up_proj", down="down_proj") | {
        ROUTER: Place(f"{mlp}.{gate}", "output"),
        EXPERTS: Place(f"{inner}.ids", "output"),
        EXPERT_WEIGHTS: Place(f"{inner}.weights", "output"),
        ROUTED: Place(f"{inner}.routed", "output"),
        **({SHARED: Place(f"{inner}.shared", "output")} if has_shared else {}),
    }


# The sum of routed and shared experts is no module's.
_SHARED_BESIDE: Final = {
    "mlp.input": Place("post_attention_layernorm", "output"),
    SHARED: Place("shared_mlp", "output"),
}
_BLOCK_SPARSE: Final = ATTENTION | engine_experts("block_sparse_moe")

VLLM: Final = (
    dataclasses.replace(
        LLAMA,
        name="moe",
        model_classes=(
            "Ernie4_5_MoeForCausalLM",
            "OlmoeForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
        ),
        leaves=ATTENTION | engine_experts("mlp"),
    ),
    dataclasses.replace(
        LLAMA,
        name="glm4_moe",
        model_classes=("Glm4MoeForCausalLM",),
        leaves=ATTENTION | engine_experts("mlp", has_shared=True),
    ),
    dataclasses.replace(
        LLAMA,
        name="mla",
        model_classes=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
        leaves=without({QUERIES, KEYS, VALUES}, ATTENTION) | engine_experts("mlp", has_shared=True) | _LATENT,
        kernel="self_attn.mla_attn.mla_attn",
    ),
    dataclasses.replace(
        LLAMA,
        name="gpt_oss",
        model_classes=("GptOssForCausalLM",),
        leaves=attention_leaves("attn", qkv="qkv_proj", out="o_proj") | engine_experts("mlp", gate="router"),
        kernel="attn.attn",
        hidden_index=0,
    ),
    dataclasses.replace(
        LLAMA,
        name="llama4",
        model_classes=("Llama4ForCausalLM",),
        # transformers has no module for what the chosen experts add.
        leaves=without({*_REORDERED, ROUTED}, ATTENTION | engine_experts("feed_forward", gate="router")),
    ),
    dataclasses.replace(
        LLAMA,
        name="granitemoe",
        model_classes=("GraniteMoeForCausalLM",),
        leaves=_BLOCK_SPARSE,
        returns_residual=False,
    ),
    dataclasses.replace(
        LLAMA,
        name="mixtral",
        model_classes=("MixtralForCausalLM", "MiniMaxM2ForCausalLM"),
        leaves=_BLOCK_SPARSE,
    ),
    dataclasses.replace(
        LLAMA,
        name="phimoe",
        model_classes=("PhiMoEForCausalLM",),
        leaves=_BLOCK_SPARSE,
        has_unused_residual=True,
    ),
    dataclasses.replace(
        LLAMA,
        name="granitemoeshared",
        model_classes=("GraniteMoeSharedForCausalLM",),
        leaves=without({"mlp.output"}, _BLOCK_SPARSE) | _SHARED_BESIDE,
        returns_residual=False,
    ),
)
"""The layouts in vLLM."""


def routed_leaves(
    mlp: str = "mlp", *, router: str = "gate", operation: str = "F_linear_0"
) -> dict[str, Place]:
    """Return the leaves, in transformers, of an MLP with, at least in some layers, experts.

    ``operation`` is that of the router which computes the logits.
    """
    return mlp_leaves(mlp, gate="gate_proj", up="up_proj", down="down_proj") | {
        ROUTER: Place(f"{mlp}.{router}", "output", operation=operation),
        EXPERTS: Place(f"{mlp}.{router}", "output", "ids"),
        EXPERT_WEIGHTS: Place(f"{mlp}.{router}", "output", "weights"),
        ROUTED: Place(f"{mlp}.experts", "output"),
    }


_SHARED_INSIDE: Final = {SHARED: Place("mlp.shared_experts", "output")}

EXPERT_BLOCKS: Final = dataclasses.replace(
    TRANSFORMERS_LLAMA,
    model_types=("ernie4_5_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    leaves=TRANSFORMERS_ATTENTION | routed_leaves(),
    flattened=frozenset({ROUTER, EXPERTS, EXPERT_WEIGHTS, ROUTED}),
)

_GRANITE_LEAVES: Final = TRANSFORMERS_ATTENTION | routed_leaves("block_sparse_moe", router="router")
_GRANITE: Final = dataclasses.replace(
    EXPERT_BLOCKS,
    model_types=("granitemoe",),
    embed="",  # it scales embeddings
    mlp="block_sparse_moe",
    leaves=_GRANITE_LEAVES,
    router_order=(2, 1, 0),
)

TRANSFORMERS: Final = (
    EXPERT_BLOCKS,
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("glm4_moe",),
        leaves=TRANSFORMERS_ATTENTION | routed_leaves() | _SHARED_INSIDE,
    ),
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        leaves=without({QUERIES, KEYS, VALUES}, TRANSFORMERS_ATTENTION)
        | routed_leaves()
        | _SHARED_INSIDE
        | _LATENT,
        has_pattern=False,
    ),
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("gpt_oss",),
        leaves=TRANSFORMERS_ATTENTION | routed_leaves(router="router"),
        has_pattern=False,  # attention has sinks beside the positions
    ),
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("phimoe",),
        leaves=TRANSFORMERS_ATTENTION | routed_leaves(router="router", operation="super_forward_0"),
    ),
    _GRANITE,
    dataclasses.replace(
        _GRANITE,
        model_types=("granitemoeshared",),
        mlp="",
        leaves=without({"mlp.output"}, _GRANITE_LEAVES) | _SHARED_BESIDE,
    ),
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("llama4_text",),
        mlp="feed_forward",
        leaves=without(
            {*_REORDERED, ROUTED},
            TRANSFORMERS_ATTENTION
            | routed_leaves("feed_forward", router="router", operation="super_forward_0"),
        ),
        flattened=EXPERT_BLOCKS.flattened | {"mlp.output"},
        router_order=(1, 0),
        has_pattern=False,
    ),
)
"""The layouts in transformers."""
