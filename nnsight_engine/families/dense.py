"""Tables of dense decoders with separate norms for attention and a gated or plain MLP, as Llama's.

vLLM fuses projections, and runs some architectures through its Transformers backend.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from nnsight_engine.families.layout import EngineFamily, TransformersFamily, attention_leaves, mlp_leaves

QKV: Final = ("q_proj", "k_proj", "v_proj")
"""Projections that transformers keeps apart."""

ATTENTION: Final = attention_leaves("self_attn", qkv="qkv_proj", out="o_proj")
# Attention modules of transformers return (output, weights), so the output of the projection is used instead.
_TUPLE_ATTENTION: Final = attention_leaves("self_attn", qkv="qkv_proj", out="o_proj", ends_at_out=True)
TRANSFORMERS_ATTENTION: Final = attention_leaves("self_attn", qkv=QKV, out="o_proj", ends_at_out=True)
_FUSED_MLP: Final = mlp_leaves("mlp", gate_up="gate_up_proj", down="down_proj")
_UNGATED_MLP: Final = mlp_leaves("mlp", up="up_proj", down="down_proj")
_PHI_MLP: Final = mlp_leaves("mlp", up="fc1", down="fc2")
_STARCODER2_MLP: Final = mlp_leaves("mlp", up="c_fc", down="c_proj")

LLAMA_LEAVES: Final = ATTENTION | _FUSED_MLP
LLAMA: Final = EngineFamily(
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
    leaves=LLAMA_LEAVES,
    kernel="self_attn.attn",
    hidden_index=1,
    returns_residual=True,
)

# vLLM 0.32 has no implementation of these. Its Transformers backend runs transformers' modules with vLLM's
# linear layers, and fuses projections that transformers keeps apart.
_TRANSFORMERS_BACKEND: Final = EngineFamily(
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
    leaves=_TUPLE_ATTENTION | _FUSED_MLP,
    kernel="self_attn.attn",
    is_batched=True,
    is_kernel_bare=True,
)

VLLM: Final = (
    LLAMA,
    dataclasses.replace(
        LLAMA,
        name="cohere",
        model_classes=("CohereForCausalLM", "Cohere2ForCausalLM"),
        has_unused_residual=True,
        sums_at_once=True,
    ),
    dataclasses.replace(
        LLAMA,
        name="exaone4",
        model_classes=("Exaone4ForCausalLM", "StablelmForCausalLM", "StableLmForCausalLM"),
        has_unused_residual=True,
    ),
    dataclasses.replace(LLAMA, name="granite", model_classes=("GraniteForCausalLM",), returns_residual=False),
    dataclasses.replace(
        LLAMA,
        name="nemotron",
        model_classes=("NemotronForCausalLM", "ApertusForCausalLM"),
        leaves=ATTENTION | _UNGATED_MLP,
    ),
    dataclasses.replace(
        LLAMA,
        name="idefics3",
        model_classes=("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        layers="model.text_model.layers",
        final_norm="model.text_model.norm",
        encoder="model.vision_model.encoder.layers",
        merged_patches="scale_factor",
    ),
    _TRANSFORMERS_BACKEND,
    dataclasses.replace(
        _TRANSFORMERS_BACKEND,
        name="arcee",
        architectures=("ArceeForCausalLM",),
        leaves=_TUPLE_ATTENTION | _UNGATED_MLP,
    ),
    dataclasses.replace(
        _TRANSFORMERS_BACKEND,
        name="phi",
        architectures=("PhiForCausalLM",),
        final_norm="model.final_layernorm",
        leaves=attention_leaves("self_attn", qkv="qkv_proj", out="dense", ends_at_out=True) | _PHI_MLP,
    ),
    dataclasses.replace(
        _TRANSFORMERS_BACKEND,
        name="starcoder2",
        architectures=("Starcoder2ForCausalLM",),
        leaves=_TUPLE_ATTENTION | _STARCODER2_MLP,
    ),
)
"""The layouts in vLLM."""

TRANSFORMERS_LLAMA_LEAVES: Final = TRANSFORMERS_ATTENTION | mlp_leaves(
    "mlp", gate="gate_proj", up="up_proj", down="down_proj"
)
TRANSFORMERS_LLAMA: Final = TransformersFamily(
    model_types=(
        *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3"),
        *("gemma", "gemma2", "gemma3_text", "gemma3"),
        *("cohere", "cohere2", "ernie4_5", "hunyuan_v1_dense", "olmo", "seed_oss", "smollm3", "stablelm"),
    ),
    bodies=("model", "model.language_model", ""),
    layers="layers",
    norm="norm",
    embed="embed_tokens",
    attention="self_attn",
    mlp="mlp",
    leaves=TRANSFORMERS_LLAMA_LEAVES,
)

TRANSFORMERS: Final = (
    TRANSFORMERS_LLAMA,
    dataclasses.replace(TRANSFORMERS_LLAMA, model_types=("phi3",), leaves=_TUPLE_ATTENTION | _FUSED_MLP),
    dataclasses.replace(
        TRANSFORMERS_LLAMA, model_types=("glm", "glm4"), leaves=TRANSFORMERS_ATTENTION | _FUSED_MLP
    ),
    dataclasses.replace(TRANSFORMERS_LLAMA, model_types=("exaone4", "olmo2", "olmo3"), has_norms_last=True),
    dataclasses.replace(TRANSFORMERS_LLAMA, model_types=("granite",), embed=""),  # it scales embeddings
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("idefics3", "smolvlm"),
        bodies=("model.text_model",),
        embed="",  # images are merged into what it returns
        encoder="model.vision_model.encoder.layers",
    ),
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("nemotron", "apertus", "arcee"),
        leaves=TRANSFORMERS_ATTENTION | _UNGATED_MLP,
    ),
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("phi",),
        norm="final_layernorm",
        embed="",  # in training mode, dropout follows the embedding
        leaves=attention_leaves("self_attn", qkv=QKV, out="dense", ends_at_out=True) | _PHI_MLP,
    ),
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("starcoder2",),
        embed="",  # likewise
        leaves=TRANSFORMERS_ATTENTION | _STARCODER2_MLP,
    ),
)
"""The layouts in transformers."""
