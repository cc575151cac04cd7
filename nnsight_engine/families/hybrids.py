"""Tables of decoders that mix attention with recurrence or convolution.

A block has ``mixer.output`` where it has a recurrent or convolutional mixer, and attention's leaves where it
has attention; in most models it has one of the two.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from nnsight_engine.core.model_spec import MIXER, QUERIES, ROUTER, SHARED, STATE, ordered
from nnsight_engine.families.dense import (
    ATTENTION,
    LLAMA_LEAVES,
    QKV,
    TRANSFORMERS_ATTENTION,
    TRANSFORMERS_LLAMA,
    TRANSFORMERS_LLAMA_LEAVES,
)
from nnsight_engine.families.experts import EXPERT_BLOCKS, engine_experts
from nnsight_engine.families.layout import (
    EngineFamily,
    Place,
    TransformersFamily,
    attention_leaves,
    mlp_leaves,
)


def _mixer(path: str, *, needs: str = "") -> dict[str, Place]:
    place = Place(path, "output", needs=needs)
    return {MIXER: place, STATE: place}


# Beside experts, the MLP is the shared expert, and no module returns the sum of both.
_GRANITE_EXPERTS: Final = "block_sparse_moe"
_GRANITE_LEAVES: Final = (
    mlp_leaves("shared_mlp", gate_up="input_linear", down="output_linear", lacks=_GRANITE_EXPERTS)
    | {SHARED: Place("shared_mlp", "output", needs=_GRANITE_EXPERTS)}
    | _mixer("mamba")
)
_GRANITE_ORDER: Final = ordered((ROUTER, "mlp.input"))

# A block is one thing, called ``mixer``: recurrence, attention or an MLP.
_NEMOTRON_MLP: Final = mlp_leaves("mixer", up="up_proj", down="down_proj") | {
    "mlp.input": Place("mixer", "input", needs="mixer.up_proj"),
    "mlp.output": Place("mixer", "output", needs="mixer.up_proj"),
}

# Several blocks call the same module for attention and MLP, so that no hook tells the blocks apart.
_ZAMBA2_MIXERS: Final = (Place("mamba", "output"), Place("mamba_decoder.mamba", "output"))
_ZAMBA2_LEAVES: Final = {MIXER: _ZAMBA2_MIXERS, STATE: _ZAMBA2_MIXERS}

_LINEAR_ATTENTION: Final = {MIXER: Place("linear_attn", "output")}

_QWEN3_NEXT: Final = EngineFamily(
    name="qwen3_next",
    model_classes=("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"),
    layers="model.layers",
    final_norm="model.norm",
    leaves=ATTENTION | engine_experts("mlp") | _LINEAR_ATTENTION,
    kernel="self_attn.attn",
    returns_residual=True,
    # Attention gates its output, by the other half of what the projection of queries returns.
    has_query_gates=True,
)

VLLM: Final = (
    EngineFamily(
        name="falcon_h1",
        model_classes=("FalconH1ForCausalLM",),
        layers="model.layers",
        final_norm="model.final_layernorm",
        # What attention's own module returns is scaled by the block.
        leaves=attention_leaves("self_attn", qkv="qkv_proj", out="o_proj", ends_at_out=True)
        | mlp_leaves("feed_forward", gate_up="gate_up_proj", down="down_proj")
        | _mixer("mamba.mamba"),
        kernel="self_attn.attn",
        hidden_index=1,
    ),
    EngineFamily(
        name="granitemoehybrid",
        model_classes=("GraniteMoeHybridForCausalLM",),
        layers="model.layers",
        final_norm="model.norm",
        leaves=ATTENTION | _GRANITE_LEAVES | {ROUTER: Place(f"{_GRANITE_EXPERTS}.gate", "output")},
        order=_GRANITE_ORDER,
        kernel="self_attn.attn",
        returns_residual=True,
        has_unused_residual=True,
    ),
    EngineFamily(
        name="lfm2",
        model_classes=("Lfm2ForCausalLM",),
        layers="model.layers",
        final_norm="model.embedding_norm",
        # The convolution writes into a tensor that it is given, so the output of its projection is used.
        leaves=attention_leaves("self_attn", qkv="qkv_proj", out="out_proj")
        | mlp_leaves("feed_forward", gate_up="w13", down="w2")
        | {MIXER: Place("short_conv.out_proj", "output")},
        kernel="self_attn.attn",
        returns_residual=True,
    ),
    EngineFamily(
        name="mamba2",
        model_classes=("Mamba2ForCausalLM",),
        layers="backbone.layers",
        final_norm="backbone.norm_f",
        leaves=_mixer("mixer"),
        kernel="",
        returns_residual=True,
    ),
    EngineFamily(
        name="nemotron_h",
        model_classes=("NemotronHForCausalLM",),
        layers="model.layers",
        final_norm="model.norm_f",
        leaves=attention_leaves("mixer", qkv="qkv_proj", out="o_proj", ends_at_out=True)
        | _NEMOTRON_MLP
        | _mixer("mixer", needs="mixer.out_proj")
        | {MIXER: Place("mixer.out_proj", "output")},
        kernel="mixer.attn",
        returns_residual=True,
    ),
    _QWEN3_NEXT,
    dataclasses.replace(
        _QWEN3_NEXT,
        name="qwen3_5",
        model_classes=("Qwen3_5ForCausalLM",),
        leaves=LLAMA_LEAVES | _LINEAR_ATTENTION,
    ),
    EngineFamily(
        name="zamba2",
        model_classes=("Zamba2ForCausalLM",),
        layers="model.layers",
        final_norm="model.final_layernorm",
        leaves=_ZAMBA2_LEAVES,
        kernel="",
    ),
)
"""The layouts in vLLM."""

TRANSFORMERS: Final = (
    TransformersFamily(
        model_types=("falcon_h1",),
        bodies=("model", ""),
        layers="layers",
        norm="final_layernorm",
        embed="",  # it scales embeddings
        attention="self_attn",
        mlp="feed_forward",
        leaves=TRANSFORMERS_ATTENTION
        | mlp_leaves("feed_forward", gate="gate_proj", up="up_proj", down="down_proj")
        | _mixer("mamba"),
        order=ordered((MIXER, QUERIES), (STATE, QUERIES), ("mlp.up", "mlp.gate")),
    ),
    TransformersFamily(
        model_types=("granitemoehybrid",),
        bodies=("model", ""),
        layers="layers",
        norm="norm",
        embed="",  # it scales embeddings
        attention="self_attn",
        mlp="shared_mlp",
        leaves=TRANSFORMERS_ATTENTION
        | _GRANITE_LEAVES
        | {ROUTER: Place(f"{_GRANITE_EXPERTS}.router", "output", operation="F_linear_0")},
        order=_GRANITE_ORDER,
        flattened=frozenset({ROUTER}),
    ),
    TransformersFamily(
        model_types=("lfm2",),
        bodies=("model", ""),
        layers="layers",
        norm="embedding_norm",
        embed="embed_tokens",
        attention="self_attn",
        mlp="feed_forward",
        leaves=attention_leaves("self_attn", qkv=QKV, out="out_proj", ends_at_out=True)
        | mlp_leaves("feed_forward", gate="w1", up="w3", down="w2")
        | {MIXER: Place("conv", "output")},
    ),
    TransformersFamily(
        model_types=("mamba2",),
        bodies=("backbone", ""),
        layers="layers",
        norm="norm_f",
        embed="embeddings",
        attention="",
        mlp="",
        leaves=_mixer("mixer"),
    ),
    TransformersFamily(
        model_types=("nemotron_h",),
        bodies=("model", ""),
        layers="layers",
        norm="norm_f",
        embed="embeddings",
        attention="mixer",
        mlp="mixer",
        leaves=attention_leaves("mixer", qkv=QKV, out="o_proj", ends_at_out=True)
        | _NEMOTRON_MLP
        | _mixer("mixer", needs="mixer.in_proj"),
    ),
    dataclasses.replace(
        EXPERT_BLOCKS,
        model_types=("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
        leaves={**EXPERT_BLOCKS.leaves, **_LINEAR_ATTENTION},
        has_query_gates=True,
    ),
    dataclasses.replace(
        TRANSFORMERS_LLAMA,
        model_types=("qwen3_5", "qwen3_5_text"),
        leaves=TRANSFORMERS_LLAMA_LEAVES | _LINEAR_ATTENTION,
        has_query_gates=True,
    ),
    TransformersFamily(
        model_types=("zamba2",),
        bodies=("model", ""),
        layers="layers",
        norm="final_layernorm",
        embed="",  # blocks with attention read the embeddings again
        attention="",
        mlp="",
        leaves=_ZAMBA2_LEAVES,
    ),
)
"""The layouts in transformers."""
