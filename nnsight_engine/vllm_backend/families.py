"""Location of each point of the vocabulary in the module tree of each model family in vLLM.

A point such as ``layers.3.attn.q`` means the same on every architecture, but vLLM fuses, splits and names
modules differently in each. The tables in this module say which module carries a point, and on which side of
the module. ``model_points`` resolves a table against one loaded model.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Final

from nnsight_engine.core.model_spec import EXPERTS_LEAF, LATENT_LEAF, ROUTER_LEAF, WEIGHTS_LEAF
from nnsight_engine.envoys.architectures.places import renamed
from nnsight_engine.vllm_backend.engine_family import EngineFamily, HookSpec, block_leaves, gate_and_up
from nnsight_engine.vllm_backend.hybrid_families import HYBRIDS

SUMMED_LEAVES: Final = frozenset({"moe.output", "moe.shared.output"})
"""Leaves of which each tensor-parallel rank has a summand."""

SHARDED_LEAVES: Final = frozenset(
    {"attn.q", "attn.k", "attn.v", "attn.heads", "mlp.gate", "mlp.up", "mlp.act"}
)
"""Leaves of which each tensor-parallel rank computes only its own columns."""


class UnsupportedModelError(Exception):
    """The loaded model's architecture is in no table, or its modules do not match its table."""

    @classmethod
    def unknown(cls, class_name: str, architectures: Sequence[str]) -> UnsupportedModelError:
        """Return the error for a model of no table."""
        supported = [name for family in FAMILIES for name in family.architectures or family.model_classes]
        return cls(
            f"the architecture must be one of {', '.join(supported)}, "
            f"got {', '.join(architectures) or 'none'} (vLLM class {class_name}); serve another model, "
            "drop --model-impl transformers if it was given, or drop --points strict"
        )


_LLAMA_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    block_leaves(
        attention="self_attn",
        qkv="self_attn.qkv_proj",
        out="self_attn.o_proj",
        mlp="mlp",
        up="mlp.gate_up_proj",
        down="mlp.down_proj",
    )
    | gate_and_up("mlp.gate_up_proj")
)


def _experts(mlp: str, *, gate: str = "gate", has_shared: bool = False) -> Mapping[str, HookSpec]:
    """Return the leaves of a block with Llama's attention and, at least in some layers, experts.

    Experts have no neurons in common, so that no module has them.

    Args:
        mlp: The MLP.
        gate: The module of the router's logits, below the MLP.
        has_shared: Whether what shared experts add is a value in transformers, too.
    """
    inner = f"{mlp}.experts.inner"  # modules that ``expert_points`` adds
    return types.MappingProxyType(
        {
            **_LLAMA_LEAVES,
            "mlp.input": HookSpec(mlp, "input"),
            ROUTER_LEAF: HookSpec(f"{mlp}.{gate}", "output"),
            EXPERTS_LEAF: HookSpec(f"{inner}.ids", "output"),
            WEIGHTS_LEAF: HookSpec(f"{inner}.weights", "output"),
            "moe.output": HookSpec(f"{inner}.routed", "output"),
            "mlp.output": HookSpec(mlp, "output"),
        }
        | ({"moe.shared.output": HookSpec(f"{inner}.shared", "output")} if has_shared else {})
    )


def _latent(experts: Mapping[str, HookSpec]) -> Mapping[str, HookSpec]:
    """Return leaves of a block whose attention compresses keys and values (MLA), as DeepSeek's."""
    return types.MappingProxyType(
        {
            **{leaf: spec for leaf, spec in experts.items() if leaf not in {"attn.q", "attn.k", "attn.v"}},
            LATENT_LEAF: HookSpec("self_attn.kv_a_layernorm", "output"),
        }
    )


def _without(names: frozenset[str], leaves: Mapping[str, HookSpec]) -> Mapping[str, HookSpec]:
    """Return leaves without those that are not the same values in transformers."""
    return types.MappingProxyType({leaf: spec for leaf, spec in leaves.items() if leaf not in names})


_LLAMA4_LACKS: Final = frozenset({"attn.q", "attn.k", "moe.output"})
"""vLLM orders the numbers of queries and keys differently; transformers has no module for the last."""

_NEMOTRON_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    block_leaves(
        attention="self_attn",
        qkv="self_attn.qkv_proj",
        out="self_attn.o_proj",
        mlp="mlp",
        up="mlp.up_proj",
        down="mlp.down_proj",
    )
)

# Modules of transformers return (output, weights), so the output of the projection is used instead.
_TRANSFORMERS_LLAMA_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    {**_LLAMA_LEAVES, "attn.output": HookSpec("self_attn.o_proj", "output")}
)

_PHI_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    block_leaves(
        attention="self_attn.dense",
        qkv="self_attn.qkv_proj",
        out="self_attn.dense",
        mlp="mlp",
        up="mlp.fc1",
        down="mlp.fc2",
    )
)

_STARCODER2_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    block_leaves(
        attention="self_attn.o_proj",
        qkv="self_attn.qkv_proj",
        out="self_attn.o_proj",
        mlp="mlp",
        up="mlp.c_fc",
        down="mlp.c_proj",
    )
)

_GPT2_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    block_leaves(
        attention="attn", qkv="attn.c_attn", out="attn.c_proj", mlp="mlp", up="mlp.c_fc", down="mlp.c_proj"
    )
)

# In OPT the MLP is two linear layers of the block itself, so its input and output are theirs.
_OPT_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    block_leaves(
        attention="self_attn",
        qkv="self_attn.qkv_proj",
        out="self_attn.out_proj",
        mlp="fc1",
        up="fc1",
        down="fc2",
    )
    | {"mlp.output": HookSpec("fc2", "output")}
)

# The attention module returns (output, weights), so the output of its projection is used instead.
_GPT_NEOX_LEAVES: Final[Mapping[str, HookSpec]] = types.MappingProxyType(
    block_leaves(
        attention="attention.dense",
        qkv="attention.query_key_value",
        out="attention.dense",
        mlp="mlp",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )
)

_LLAMA: Final = EngineFamily(
    name="llama",
    model_classes=(
        "LlamaForCausalLM",
        "Ernie4_5ForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4ForCausalLM",
        "Phi3ForCausalLM",
    ),
    layers="model.layers",
    final_norm="model.norm",
    leaves=_LLAMA_LEAVES,
    kernel="self_attn.attn",
    hidden_index=1,
    returns_residual=True,
)

# vLLM 0.32 has no implementation of these. Its Transformers backend runs transformers' modules with vLLM's
# linear layers, and fuses projections that transformers keeps apart.
_TRANSFORMERS_LLAMA: Final = EngineFamily(
    name="transformers_llama",
    model_classes=("TransformersForCausalLM",),
    architectures=(
        "GlmForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "MinistralForCausalLM",
        "OlmoForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
    ),
    layers="model.layers",
    final_norm="model.norm",
    leaves=_TRANSFORMERS_LLAMA_LEAVES,
    kernel="self_attn.attn",
    is_batched=True,
    is_kernel_bare=True,
)

FAMILIES: Final = (
    _LLAMA,
    dataclasses.replace(
        _LLAMA,
        name="moe",
        model_classes=(
            "Ernie4_5_MoeForCausalLM",
            "OlmoeForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
        ),
        leaves=_experts("mlp"),
    ),
    dataclasses.replace(
        _LLAMA,
        name="glm4_moe",
        model_classes=("Glm4MoeForCausalLM",),
        leaves=_experts("mlp", has_shared=True),
    ),
    dataclasses.replace(
        _LLAMA,
        name="mla",
        model_classes=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
        leaves=_latent(_experts("mlp", has_shared=True)),
        kernel="self_attn.mla_attn.mla_attn",
    ),
    dataclasses.replace(
        _LLAMA,
        name="gpt_oss",
        model_classes=("GptOssForCausalLM",),
        leaves=renamed(_experts("mlp", gate="router"), {"self_attn": "attn"}),
        kernel="attn.attn",
        hidden_index=0,
    ),
    dataclasses.replace(
        _LLAMA,
        name="llama4",
        model_classes=("Llama4ForCausalLM",),
        leaves=_without(_LLAMA4_LACKS, renamed(_experts("mlp", gate="router"), {"mlp": "feed_forward"})),
    ),
    dataclasses.replace(
        _LLAMA,
        name="granitemoe",
        model_classes=("GraniteMoeForCausalLM",),
        leaves=_experts("block_sparse_moe"),
        returns_residual=False,
    ),
    dataclasses.replace(
        _LLAMA, name="mixtral", model_classes=("MixtralForCausalLM",), leaves=_experts("block_sparse_moe")
    ),
    # The sum of routed and shared experts is no module's.
    dataclasses.replace(
        _LLAMA,
        name="granitemoeshared",
        model_classes=("GraniteMoeSharedForCausalLM",),
        leaves=types.MappingProxyType(
            {
                **_without(frozenset({"mlp.output"}), _experts("block_sparse_moe")),
                "mlp.input": HookSpec("post_attention_layernorm", "output"),
                "moe.shared.output": HookSpec("shared_mlp", "output"),
            }
        ),
        returns_residual=False,
    ),
    dataclasses.replace(
        _LLAMA,
        name="cohere",
        model_classes=("CohereForCausalLM", "Cohere2ForCausalLM"),
        has_unused_residual=True,
        sums_at_once=True,
    ),
    dataclasses.replace(
        _LLAMA,
        name="exaone4",
        model_classes=("Exaone4ForCausalLM", "StablelmForCausalLM", "StableLmForCausalLM"),
        has_unused_residual=True,
    ),
    dataclasses.replace(
        _LLAMA, name="granite", model_classes=("GraniteForCausalLM",), returns_residual=False
    ),
    dataclasses.replace(
        _LLAMA, name="nemotron", model_classes=("NemotronForCausalLM",), leaves=_NEMOTRON_LEAVES
    ),
    dataclasses.replace(
        _LLAMA,
        name="idefics3",
        model_classes=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        layers="model.text_model.layers",
        final_norm="model.text_model.norm",
    ),
    EngineFamily(
        name="gpt2",
        model_classes=("GPT2LMHeadModel",),
        layers="transformer.h",
        final_norm="transformer.ln_f",
        leaves=_GPT2_LEAVES,
        kernel="attn.attn",
    ),
    EngineFamily(
        name="opt",
        model_classes=("OPTForCausalLM",),
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        project_out="model.decoder.project_out",
        leaves=_OPT_LEAVES,
        kernel="self_attn.attn",
    ),
    _TRANSFORMERS_LLAMA,
    dataclasses.replace(
        _TRANSFORMERS_LLAMA,
        name="phi",
        architectures=("PhiForCausalLM",),
        final_norm="model.final_layernorm",
        leaves=_PHI_LEAVES,
    ),
    dataclasses.replace(
        _TRANSFORMERS_LLAMA,
        name="starcoder2",
        architectures=("Starcoder2ForCausalLM",),
        leaves=_STARCODER2_LEAVES,
    ),
    # Its fused projection has transformers' layout, one head after the other.
    dataclasses.replace(
        _TRANSFORMERS_LLAMA,
        name="gpt_neox",
        architectures=("GPTNeoXForCausalLM",),
        final_norm="model.final_layer_norm",
        leaves=_GPT_NEOX_LEAVES,
        kernel="attention.attn",
        is_qkv_interleaved=True,
    ),
    *HYBRIDS,
)
"""The tables, one per layout."""


def family_named(class_name: str, architectures: Sequence[str]) -> EngineFamily | None:
    """Return the table for a model; None if there is none.

    Args:
        class_name: Name of its class in vLLM.
        architectures: The ``architectures`` of its config.
    """
    for family in FAMILIES:
        if class_name in family.model_classes and (
            not family.architectures or any(name in family.architectures for name in architectures)
        ):
            return family
    return None


__all__ = [
    "FAMILIES",
    "SHARDED_LEAVES",
    "SUMMED_LEAVES",
    "EngineFamily",
    "HookSpec",
    "UnsupportedModelError",
    "family_named",
]
