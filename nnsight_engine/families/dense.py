"""Tables of dense decoders with separate norms for attention and a gated or plain MLP, as Llama's.

vLLM fuses projections, and runs some architectures through its Transformers backend.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from nnsight_engine.core.model_spec import KEYS, QUERIES, VALUES
from nnsight_engine.families.layout import (
    EngineFamily,
    Place,
    TransformersFamily,
    apart,
    block_leaves,
    frozen,
    gate_and_up,
    without,
)

QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Projections that transformers keeps apart."""

LLAMA_LEAVES: Final = frozen(
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

# Attention modules of transformers return (output, weights), so the output of the projection is used instead.
_ATTENTION_OUTPUT: Final = {"attn.output": Place("self_attn.o_proj", "output")}

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
    leaves=frozen({**LLAMA_LEAVES, **_ATTENTION_OUTPUT}),
    kernel="self_attn.attn",
    is_batched=True,
    is_kernel_bare=True,
)

_UNGATED_LEAVES: Final = block_leaves(
    attention="self_attn",
    qkv="self_attn.qkv_proj",
    out="self_attn.o_proj",
    mlp="mlp",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
_PHI_LEAVES: Final = block_leaves(
    attention="self_attn.dense",
    qkv="self_attn.qkv_proj",
    out="self_attn.dense",
    mlp="mlp",
    up="mlp.fc1",
    down="mlp.fc2",
)
_STARCODER2_LEAVES: Final = block_leaves(
    attention="self_attn.o_proj",
    qkv="self_attn.qkv_proj",
    out="self_attn.o_proj",
    mlp="mlp",
    up="mlp.c_fc",
    down="mlp.c_proj",
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
        leaves=frozen(_UNGATED_LEAVES),
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
        leaves=frozen(_UNGATED_LEAVES | _ATTENTION_OUTPUT),
    ),
    dataclasses.replace(
        _TRANSFORMERS_BACKEND,
        name="phi",
        architectures=("PhiForCausalLM",),
        final_norm="model.final_layernorm",
        leaves=frozen(_PHI_LEAVES),
    ),
    dataclasses.replace(
        _TRANSFORMERS_BACKEND,
        name="starcoder2",
        architectures=("Starcoder2ForCausalLM",),
        leaves=frozen(_STARCODER2_LEAVES),
    ),
)
"""The layouts in vLLM."""

TRANSFORMERS_LLAMA_LEAVES: Final = frozen(
    block_leaves(
        # The attention module returns a tuple, so the output of its projection is used.
        attention="self_attn.o_proj",
        qkv=QKV,
        out="self_attn.o_proj",
        mlp="mlp",
        up="mlp.up_proj",
        down="mlp.down_proj",
    )
    | {"mlp.gate": Place("mlp.gate_proj", "output")}
)
TRANSFORMERS_LLAMA: Final = TransformersFamily(
    model_types=(
        *(
            "llama",
            "mistral",
            "ministral",
            "ministral3",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "gemma3",
        ),
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

_PHI3_LEAVES: Final = frozen(
    block_leaves(
        attention="self_attn.o_proj",
        qkv="self_attn.qkv_proj",
        out="self_attn.o_proj",
        mlp="mlp",
        up="mlp.gate_up_proj",
        down="mlp.down_proj",
    )
    | gate_and_up("mlp.gate_up_proj")
)

TRANSFORMERS: Final = (
    TRANSFORMERS_LLAMA,
    dataclasses.replace(TRANSFORMERS_LLAMA, model_types=("phi3",), leaves=_PHI3_LEAVES),
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("glm", "glm4"),
        leaves=frozen(
            {**_PHI3_LEAVES, **{leaf: TRANSFORMERS_LLAMA_LEAVES[leaf] for leaf in (QUERIES, KEYS, VALUES)}}
        ),
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
        leaves=frozen(without({"mlp.gate"}, TRANSFORMERS_LLAMA_LEAVES)),
    ),
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("phi",),
        norm="final_layernorm",
        embed="",  # in training mode, dropout follows the embedding
        leaves=frozen(apart(_PHI_LEAVES, QKV)),
    ),
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("starcoder2",),
        embed="",  # likewise
        leaves=frozen(apart(_STARCODER2_LEAVES, QKV)),
    ),
)
"""The layouts in transformers."""
