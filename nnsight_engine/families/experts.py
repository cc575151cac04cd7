"""Tables of decoders with mixtures of experts, and with attention that compresses keys and values (MLA).

Experts have no neurons in common, so that no module has them; blocks without experts have their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
from nnsight_engine.families.dense import (
    LLAMA,
    LLAMA_LEAVES,
    TRANSFORMERS_LLAMA,
    TRANSFORMERS_LLAMA_LEAVES,
)
from nnsight_engine.families.layout import Place, frozen, moved, renamed, without

_LATENT: Final = {LATENT: Place("self_attn.kv_a_layernorm", "output")}
_REORDERED: Final = frozenset({QUERIES, KEYS})
"""Leaves of Llama 4 whose numbers vLLM orders differently."""


def engine_experts(mlp: str, *, gate: str = "gate", has_shared: bool = False) -> Mapping[str, Place]:
    """Return the leaves, in vLLM, of a block with Llama's attention and, at least in some layers, experts.

    ``gate`` is the module of the router's logits, below the MLP; ``has_shared``: what shared experts add is a
    value in transformers, too.
    """
    inner = f"{mlp}.experts.inner"  # modules that ``hooks`` adds
    return {
        **LLAMA_LEAVES,
        "mlp.input": Place(mlp, "input"),
        ROUTER: Place(f"{mlp}.{gate}", "output"),
        EXPERTS: Place(f"{inner}.ids", "output"),
        EXPERT_WEIGHTS: Place(f"{inner}.weights", "output"),
        ROUTED: Place(f"{inner}.routed", "output"),
        "mlp.output": Place(mlp, "output"),
    } | ({SHARED: Place(f"{inner}.shared", "output")} if has_shared else {})


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
        leaves=frozen(engine_experts("mlp")),
    ),
    dataclasses.replace(
        LLAMA,
        name="glm4_moe",
        model_classes=("Glm4MoeForCausalLM",),
        leaves=frozen(engine_experts("mlp", has_shared=True)),
    ),
    dataclasses.replace(
        LLAMA,
        name="mla",
        model_classes=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
        leaves=frozen(without({QUERIES, KEYS, VALUES}, engine_experts("mlp", has_shared=True)) | _LATENT),
        kernel="self_attn.mla_attn.mla_attn",
    ),
    dataclasses.replace(
        LLAMA,
        name="gpt_oss",
        model_classes=("GptOssForCausalLM",),
        leaves=frozen(renamed(engine_experts("mlp", gate="router"), {"self_attn": "attn"})),
        kernel="attn.attn",
        hidden_index=0,
    ),
    dataclasses.replace(
        LLAMA,
        name="llama4",
        model_classes=("Llama4ForCausalLM",),
        leaves=frozen(
            # transformers has no module for what the chosen experts add.
            without(
                {*_REORDERED, ROUTED}, renamed(engine_experts("mlp", gate="router"), {"mlp": "feed_forward"})
            )
        ),
    ),
    dataclasses.replace(
        LLAMA,
        name="granitemoe",
        model_classes=("GraniteMoeForCausalLM",),
        leaves=frozen(engine_experts("block_sparse_moe")),
        returns_residual=False,
    ),
    dataclasses.replace(
        LLAMA,
        name="mixtral",
        model_classes=("MixtralForCausalLM", "MiniMaxM2ForCausalLM"),
        leaves=frozen(engine_experts("block_sparse_moe")),
    ),
    dataclasses.replace(
        LLAMA,
        name="phimoe",
        model_classes=("PhiMoEForCausalLM",),
        leaves=frozen(engine_experts("block_sparse_moe")),
        has_unused_residual=True,
    ),
    # The sum of routed and shared experts is no module's.
    dataclasses.replace(
        LLAMA,
        name="granitemoeshared",
        model_classes=("GraniteMoeSharedForCausalLM",),
        leaves=frozen(
            without({"mlp.output"}, engine_experts("block_sparse_moe"))
            | {
                "mlp.input": Place("post_attention_layernorm", "output"),
                SHARED: Place("shared_mlp", "output"),
            }
        ),
        returns_residual=False,
    ),
)
"""The layouts in vLLM."""

ROUTED_LEAVES: Final = {
    **TRANSFORMERS_LLAMA_LEAVES,
    ROUTER: Place("mlp.gate", "output", operation="F_linear_0"),
    EXPERTS: Place("mlp.gate", "output", "ids"),
    EXPERT_WEIGHTS: Place("mlp.gate", "output", "weights"),
    ROUTED: Place("mlp.experts", "output"),
}
_SHARED_LEAVES: Final = {**ROUTED_LEAVES, SHARED: Place("mlp.shared_experts", "output")}
_ROUTER_LEAVES: Final = moved(ROUTED_LEAVES, {"mlp.gate": "mlp.router"})

EXPERT_BLOCKS: Final = dataclasses.replace(
    TRANSFORMERS_LLAMA,
    model_types=("ernie4_5_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    leaves=frozen(ROUTED_LEAVES),
    flattened=frozenset({ROUTER, EXPERTS, EXPERT_WEIGHTS, ROUTED}),
)

_GRANITE_LEAVES: Final = renamed(_ROUTER_LEAVES, {"mlp": "block_sparse_moe"})
_GRANITE: Final = dataclasses.replace(
    EXPERT_BLOCKS,
    model_types=("granitemoe",),
    embed="",  # it scales embeddings
    mlp="block_sparse_moe",
    leaves=frozen(_GRANITE_LEAVES),
    router_order=(2, 1, 0),
)

TRANSFORMERS: Final = (
    EXPERT_BLOCKS,
    dataclasses.replace(EXPERT_BLOCKS, model_types=("glm4_moe",), leaves=frozen(_SHARED_LEAVES)),
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        leaves=frozen(without({QUERIES, KEYS, VALUES}, _SHARED_LEAVES) | _LATENT),
        has_pattern=False,
    ),
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("gpt_oss",),
        leaves=frozen(_ROUTER_LEAVES),
        has_pattern=False,  # attention has sinks beside the positions
    ),
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("phimoe",),
        leaves=frozen({**_ROUTER_LEAVES, ROUTER: Place("mlp.router", "output", operation="super_forward_0")}),
    ),
    _GRANITE,
    # The sum of routed and shared experts is no module's.
    dataclasses.replace(
        _GRANITE,
        model_types=("granitemoeshared",),
        mlp="",
        leaves=frozen(
            without({"mlp.output"}, _GRANITE_LEAVES)
            | {
                "mlp.input": Place("post_attention_layernorm", "output"),
                SHARED: Place("shared_mlp", "output"),
            }
        ),
    ),
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("llama4_text",),
        mlp="feed_forward",
        leaves=frozen(
            without(_REORDERED, renamed(TRANSFORMERS_LLAMA_LEAVES, {"mlp": "feed_forward"}))
            | {
                ROUTER: Place("feed_forward.router", "output", operation="super_forward_0"),
                EXPERTS: Place("feed_forward.router", "output", "ids"),
                EXPERT_WEIGHTS: Place("feed_forward.router", "output", "weights"),
            }
        ),
        flattened=EXPERT_BLOCKS.flattened | {"mlp.output"},
        router_order=(1, 0),
        has_pattern=False,
    ),
)
"""The layouts in transformers."""
