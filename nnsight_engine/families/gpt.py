"""Tables of decoders in the style of GPT-2: a plain MLP, and in most of them one fused projection."""

from __future__ import annotations

import dataclasses
from typing import Final

from nnsight_engine.core.model_spec import KEYS, NEURONS, PATTERN, QUERIES, VALUES
from nnsight_engine.families.dense import QKV
from nnsight_engine.families.layout import (
    EngineFamily,
    Place,
    TransformersFamily,
    attention_leaves,
    mlp_leaves,
)

# In transformers the attention module returns a tuple, so the output of its projection is used.
_GPT2_LEAVES: Final = attention_leaves("attn", qkv="c_attn", out="c_proj", ends_at_out=True) | mlp_leaves(
    "mlp", up="c_fc", down="c_proj"
)
# The MLP is two linear layers of the block itself, so its input and output are theirs.
_OPT_MLP: Final = mlp_leaves("", up="fc1", down="fc2")
_GPTJ_MLP: Final = mlp_leaves("mlp", up="fc_in", down="fc_out")
_NEOX_MLP: Final = mlp_leaves("mlp", up="dense_h_to_4h", down="dense_4h_to_h")
_NEOX_LEAVES: Final = (
    attention_leaves("attention", qkv="query_key_value", out="dense", ends_at_out=True) | _NEOX_MLP
)
_BLOOM_ATTENTION: Final = attention_leaves("self_attention", qkv="query_key_value", out="dense")


def _falcon_leaves(*, ends_at_out: bool) -> dict[str, Place]:
    """Return Falcon's leaves; vLLM adds biases outside of the modules, so that none returns these leaves."""
    leaves = _NEOX_MLP | attention_leaves(
        "self_attention", qkv="query_key_value", out="dense", ends_at_out=ends_at_out
    )
    added_later = ("attn.output", QUERIES, KEYS, VALUES, "mlp.up", "mlp.output")
    bias = "self_attention.dense.bias"
    return leaves | {leaf: dataclasses.replace(leaves[leaf], lacks=bias) for leaf in added_later}


_GPT_NEOX: Final = EngineFamily(
    name="gpt_neox",
    # vLLM's Transformers backend: the fused projection has transformers' layout, one head after the other.
    model_classes=("TransformersForCausalLM",),
    architectures=("GPTNeoXForCausalLM",),
    layers="model.layers",
    final_norm="model.final_layer_norm",
    leaves=_NEOX_LEAVES,
    kernel="attention.attn",
    is_batched=True,
    is_kernel_bare=True,
    is_qkv_interleaved=True,
)

VLLM: Final = (
    EngineFamily(
        name="gpt2",
        model_classes=("GPT2LMHeadModel",),
        layers="transformer.h",
        final_norm="transformer.ln_f",
        leaves=_GPT2_LEAVES | {"attn.output": Place("attn", "output")},
        kernel="attn.attn",
    ),
    EngineFamily(
        name="opt",
        model_classes=("OPTForCausalLM",),
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        project_out="model.decoder.project_out",
        leaves=attention_leaves("self_attn", qkv="qkv_proj", out="out_proj") | _OPT_MLP,
        kernel="self_attn.attn",
    ),
    _GPT_NEOX,
    # Likewise, with one head of keys: vLLM does not load models with more, whose projection is as GPT-NeoX's.
    dataclasses.replace(
        _GPT_NEOX,
        name="gpt_bigcode",
        architectures=("GPTBigCodeForCausalLM",),
        layers="model.h",
        final_norm="model.ln_f",
        leaves=_GPT2_LEAVES,
        kernel="attn.attn",
        is_qkv_interleaved=False,
    ),
    EngineFamily(
        name="gptj",
        model_classes=("GPTJForCausalLM",),
        layers="transformer.h",
        final_norm="transformer.ln_f",
        leaves=attention_leaves("attn", qkv="qkv_proj", out="out_proj") | _GPTJ_MLP,
        kernel="attn.attn",
        hidden_index=1,
    ),
    EngineFamily(
        name="bloom",
        model_classes=("BloomForCausalLM",),
        layers="transformer.h",
        final_norm="transformer.ln_f",
        leaves=_BLOOM_ATTENTION | _NEOX_MLP,
        kernel="self_attention.attn",
        hidden_index=1,
    ),
    EngineFamily(
        name="falcon",
        model_classes=("FalconForCausalLM",),
        layers="transformer.h",
        final_norm="transformer.ln_f",
        leaves=_falcon_leaves(ends_at_out=False),
        kernel="self_attention.attn",
        hidden_index=1,
        sums_at_once=True,
        has_pattern=False,  # in transformers no module takes or returns the probabilities
    ),
)
"""The layouts in vLLM."""

_GPT2: Final = TransformersFamily(
    model_types=("gpt2",),
    bodies=("transformer", ""),
    layers="h",
    norm="ln_f",
    embed="",
    attention="attn",
    mlp="mlp",
    leaves=_GPT2_LEAVES,
)

TRANSFORMERS: Final = (
    _GPT2,
    TransformersFamily(
        model_types=("opt",),
        bodies=("model.decoder", "decoder", ""),
        layers="layers",
        norm="final_layer_norm",
        embed="",
        attention="self_attn",
        mlp="",
        leaves=attention_leaves("self_attn", qkv=QKV, out="out_proj", ends_at_out=True) | _OPT_MLP,
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
        leaves=_NEOX_LEAVES,
        is_qkv_per_head=True,
    ),
    dataclasses.replace(_GPT2, model_types=("gpt_bigcode",), is_qkv_per_head=True),
    dataclasses.replace(
        _GPT2,  # in training mode, dropout follows the embedding here, too
        model_types=("gptj",),
        leaves=attention_leaves("attn", qkv=QKV, out="out_proj", ends_at_out=True)
        | _GPTJ_MLP
        | {PATTERN: Place("attn.attn_dropout", "input")},
        has_pattern=False,
    ),
    dataclasses.replace(
        _GPT2,
        model_types=("bloom",),
        embed="word_embeddings_layernorm",
        attention="self_attention",
        # Attention and MLP add the residual stream to what their last projection returns.
        leaves=_BLOOM_ATTENTION
        | _NEOX_MLP
        | {
            "attn.output": Place("self_attention.dense", "output"),
            "mlp.output": Place("mlp.dense_4h_to_h", "output"),
            PATTERN: Place("self_attention.attention_dropout", "input"),
        },
        is_qkv_per_head=True,
        has_pattern=False,
    ),
    dataclasses.replace(
        _GPT2,
        model_types=("falcon",),
        embed="word_embeddings",
        attention="self_attention",
        leaves=_falcon_leaves(ends_at_out=True),
        is_qkv_per_head=True,
        has_pattern=False,
        changed_in_place=frozenset({"mlp.output"}),
    ),
)
"""The layouts in transformers."""
