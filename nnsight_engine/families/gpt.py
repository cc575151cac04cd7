"""Tables of decoders in the style of GPT-2: a plain MLP, and in most of them one fused projection."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from nnsight_engine.core.model_spec import KEYS, NEURONS, PATTERN, QUERIES, VALUES
from nnsight_engine.families.dense import QKV
from nnsight_engine.families.layout import (
    EngineFamily,
    Place,
    TransformersFamily,
    apart,
    block_leaves,
    frozen,
)

_GPT2_LEAVES: Final = block_leaves(
    # In transformers the attention module returns a tuple, so the output of its projection is used.
    attention="attn.c_proj",
    qkv="attn.c_attn",
    out="attn.c_proj",
    mlp="mlp",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
_GPT2: Final = EngineFamily(
    name="gpt2",
    model_classes=("GPT2LMHeadModel",),
    layers="transformer.h",
    final_norm="transformer.ln_f",
    leaves=frozen(_GPT2_LEAVES | {"attn.output": Place("attn", "output")}),
    kernel="attn.attn",
)

# The MLP is two linear layers of the block itself, so its input and output are theirs.
_OPT_LEAVES: Final = block_leaves(
    attention="self_attn",
    qkv="self_attn.qkv_proj",
    out="self_attn.out_proj",
    mlp=("fc1", "fc2"),
    up="fc1",
    down="fc2",
)
_OPT: Final = EngineFamily(
    name="opt",
    model_classes=("OPTForCausalLM",),
    layers="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    project_out="model.decoder.project_out",
    leaves=frozen(_OPT_LEAVES),
    kernel="self_attn.attn",
)

# vLLM's Transformers backend: the fused projection has transformers' layout, one head after the other, and
# the attention module returns (output, weights), so the output of its projection is used instead.
_GPT_NEOX: Final = EngineFamily(
    name="gpt_neox",
    model_classes=("TransformersForCausalLM",),
    architectures=("GPTNeoXForCausalLM",),
    layers="model.layers",
    final_norm="model.final_layer_norm",
    leaves=frozen(
        block_leaves(
            attention="attention.dense",
            qkv="attention.query_key_value",
            out="attention.dense",
            mlp="mlp",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        )
    ),
    kernel="attention.attn",
    is_batched=True,
    is_kernel_bare=True,
    is_qkv_interleaved=True,
)

# Likewise, with one head of keys: vLLM does not load models with more, whose projection is as GPT-NeoX's.
_GPT_BIGCODE: Final = dataclasses.replace(
    _GPT_NEOX,
    name="gpt_bigcode",
    architectures=("GPTBigCodeForCausalLM",),
    layers="model.h",
    final_norm="model.ln_f",
    leaves=frozen(_GPT2_LEAVES),
    kernel="attn.attn",
    is_qkv_interleaved=False,
)

_GPTJ_LEAVES: Final = block_leaves(
    attention="attn",
    qkv="attn.qkv_proj",
    out="attn.out_proj",
    mlp="mlp",
    up="mlp.fc_in",
    down="mlp.fc_out",
)
_GPTJ: Final = EngineFamily(
    name="gptj",
    model_classes=("GPTJForCausalLM",),
    layers="transformer.h",
    final_norm="transformer.ln_f",
    leaves=frozen(_GPTJ_LEAVES),
    kernel="attn.attn",
    hidden_index=1,
)

_BLOOM_LEAVES: Final = block_leaves(
    attention="self_attention.dense",
    qkv="self_attention.query_key_value",
    out="self_attention.dense",
    # In transformers, attention and MLP add the residual stream to what their last projection returns.
    mlp=("mlp", "mlp.dense_4h_to_h"),
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
_BLOOM: Final = EngineFamily(
    name="bloom",
    model_classes=("BloomForCausalLM",),
    layers="transformer.h",
    final_norm="transformer.ln_f",
    leaves=frozen(
        _BLOOM_LEAVES
        | {"attn.output": Place("self_attention", "output"), "mlp.output": Place("mlp", "output")}
    ),
    kernel="self_attention.attn",
    hidden_index=1,
)


def _falcon_leaves(attention: str) -> Mapping[str, Place]:
    """Return Falcon's leaves; vLLM adds biases outside of the modules, so that none returns these leaves."""
    leaves = block_leaves(
        attention=attention,
        qkv="self_attention.query_key_value",
        out="self_attention.dense",
        mlp="mlp",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )
    added_later = ("attn.output", QUERIES, KEYS, VALUES, "mlp.up", "mlp.output")
    lacking = {
        leaf: dataclasses.replace(leaves[leaf], lacks="self_attention.dense.bias") for leaf in added_later
    }
    return leaves | lacking


_FALCON: Final = EngineFamily(
    name="falcon",
    model_classes=("FalconForCausalLM",),
    layers="transformer.h",
    final_norm="transformer.ln_f",
    leaves=frozen(_falcon_leaves("self_attention")),
    kernel="self_attention.attn",
    hidden_index=1,
    sums_at_once=True,
    has_pattern=False,  # in transformers no module takes or returns the probabilities
)

VLLM: Final = (_GPT2, _OPT, _GPT_NEOX, _GPT_BIGCODE, _GPTJ, _BLOOM, _FALCON)
"""The layouts in vLLM."""

TRANSFORMERS: Final = (
    TransformersFamily(
        model_types=("gpt2",),
        bodies=("transformer", ""),
        layers="h",
        norm="ln_f",
        embed="",
        attention="attn",
        mlp="mlp",
        leaves=frozen(_GPT2_LEAVES),
    ),
    TransformersFamily(
        model_types=("opt",),
        bodies=("model.decoder", "decoder", ""),
        layers="layers",
        norm="final_layer_norm",
        embed="",
        attention="self_attn",
        mlp="",
        leaves=frozen(apart(_OPT_LEAVES, QKV) | {"attn.output": Place("self_attn.out_proj", "output")}),
        flattened=frozenset({"mlp.input", "mlp.up", NEURONS, "mlp.output"}),
    ),
    TransformersFamily(
        model_types=("gpt_neox",),
        bodies=("gpt_neox", ""),
        layers="layers",
        norm="final_layer_norm",
        embed="",  # in training mode, dropout follows the embedding
        attention="attention",
        mlp="mlp",
        leaves=_GPT_NEOX.leaves,
        is_qkv_per_head=True,
    ),
    TransformersFamily(
        model_types=("gpt_bigcode",),
        bodies=("transformer", ""),
        layers="h",
        norm="ln_f",
        embed="",
        attention="attn",
        mlp="mlp",
        leaves=frozen(_GPT2_LEAVES),
        is_qkv_per_head=True,
    ),
    TransformersFamily(
        model_types=("gptj",),
        bodies=("transformer", ""),
        layers="h",
        norm="ln_f",
        embed="",  # in training mode, dropout follows the embedding
        attention="attn",
        mlp="mlp",
        leaves=frozen(
            apart(_GPTJ_LEAVES, ("attn.q_proj", "attn.k_proj", "attn.v_proj"))
            | {
                "attn.output": Place("attn.out_proj", "output"),
                PATTERN: Place("attn.attn_dropout", "input"),
            }
        ),
        has_pattern=False,
    ),
    TransformersFamily(
        model_types=("bloom",),
        bodies=("transformer", ""),
        layers="h",
        norm="ln_f",
        embed="word_embeddings_layernorm",
        attention="self_attention",
        mlp="mlp",
        leaves=frozen(_BLOOM_LEAVES | {PATTERN: Place("self_attention.attention_dropout", "input")}),
        is_qkv_per_head=True,
        has_pattern=False,
    ),
    TransformersFamily(
        model_types=("falcon",),
        bodies=("transformer", ""),
        layers="h",
        norm="ln_f",
        embed="word_embeddings",
        attention="self_attention",
        mlp="mlp",
        leaves=frozen(_falcon_leaves("self_attention.dense")),
        is_qkv_per_head=True,
        has_pattern=False,
        changed_in_place=frozenset({"mlp.output"}),
    ),
)
"""The layouts in transformers."""
