"""Tables of decoders that mix attention with recurrence or convolution.

A block has ``mixer.output`` where it has a recurrent or convolutional mixer, and attention's leaves where it
has attention; in most models it has one of the two.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from nnsight_engine.core.model_spec import MIXER, QUERIES, ROUTER, SHARED, STATE, ordered
from nnsight_engine.families.dense import LLAMA_LEAVES, QKV, TRANSFORMERS_LLAMA, TRANSFORMERS_LLAMA_LEAVES
from nnsight_engine.families.experts import EXPERT_BLOCKS, ROUTED_LEAVES, engine_experts
from nnsight_engine.families.layout import (
    EngineFamily,
    Place,
    TransformersFamily,
    apart,
    block_leaves,
    frozen,
    gate_and_up,
    mlp_lacks,
)

_FALCON_H1: Final = EngineFamily(
    name="falcon_h1",
    model_classes=("FalconH1ForCausalLM",),
    layers="model.layers",
    final_norm="model.final_layernorm",
    leaves=frozen(
        block_leaves(
            attention="self_attn.o_proj",  # what attention's own module returns is scaled by the block
            qkv="self_attn.qkv_proj",
            out="self_attn.o_proj",
            mlp="feed_forward",
            up="feed_forward.gate_up_proj",
            down="feed_forward.down_proj",
        )
        | gate_and_up("feed_forward.gate_up_proj")
        | {MIXER: Place("mamba.mamba", "output"), STATE: Place("mamba.mamba", "output")}
    ),
    kernel="self_attn.attn",
    hidden_index=1,
)
_TRANSFORMERS_FALCON_H1: Final = TransformersFamily(
    model_types=("falcon_h1",),
    bodies=("model", ""),
    layers="layers",
    norm="final_layernorm",
    embed="",  # it scales embeddings
    attention="self_attn",
    mlp="feed_forward",
    leaves=frozen(
        block_leaves(
            attention="self_attn.o_proj",
            qkv=QKV,
            out="self_attn.o_proj",
            mlp="feed_forward",
            up="feed_forward.up_proj",
            down="feed_forward.down_proj",
        )
        | {
            "mlp.gate": Place("feed_forward.gate_proj", "output"),
            MIXER: Place("mamba", "output"),
            STATE: Place("mamba", "output"),
        }
    ),
    order=ordered((MIXER, QUERIES), (STATE, QUERIES), ("mlp.up", "mlp.gate")),
)

# Beside experts, the MLP is the shared expert, and no module returns the sum of both.
_GRANITE_EXPERTS: Final = "block_sparse_moe"
_GRANITE_SHARED: Final = Place("shared_mlp", "output", needs=_GRANITE_EXPERTS)
_GRANITE_ORDER: Final = ordered((ROUTER, "mlp.input"))
_GRANITE_LEAVES: Final = mlp_lacks(
    block_leaves(
        attention="self_attn",
        qkv="self_attn.qkv_proj",
        out="self_attn.o_proj",
        mlp="shared_mlp",
        up="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
    )
    | gate_and_up("shared_mlp.input_linear"),
    _GRANITE_EXPERTS,
)
_GRANITE: Final = EngineFamily(
    name="granitemoehybrid",
    model_classes=("GraniteMoeHybridForCausalLM",),
    layers="model.layers",
    final_norm="model.norm",
    leaves=frozen(
        _GRANITE_LEAVES
        | {
            ROUTER: Place(f"{_GRANITE_EXPERTS}.gate", "output"),
            SHARED: _GRANITE_SHARED,
            MIXER: Place("mamba", "output"),
            STATE: Place("mamba", "output"),
        }
    ),
    order=_GRANITE_ORDER,
    kernel="self_attn.attn",
    returns_residual=True,
    has_unused_residual=True,
)
_TRANSFORMERS_GRANITE: Final = TransformersFamily(
    model_types=("granitemoehybrid",),
    bodies=("model", ""),
    layers="layers",
    norm="norm",
    embed="",  # it scales embeddings
    attention="self_attn",
    mlp="shared_mlp",
    leaves=frozen(
        apart(_GRANITE_LEAVES, QKV)
        | {
            "attn.output": Place("self_attn.o_proj", "output"),
            ROUTER: Place(f"{_GRANITE_EXPERTS}.router", "output", operation="F_linear_0"),
            SHARED: _GRANITE_SHARED,
            MIXER: Place("mamba", "output"),
            STATE: Place("mamba", "output"),
        }
    ),
    order=_GRANITE_ORDER,
    flattened=frozenset({ROUTER}),
)

# In vLLM the convolution writes into a tensor that it is given, so the output of its projection is used.
_LFM2: Final = EngineFamily(
    name="lfm2",
    model_classes=("Lfm2ForCausalLM",),
    layers="model.layers",
    final_norm="model.embedding_norm",
    leaves=frozen(
        block_leaves(
            attention="self_attn",
            qkv="self_attn.qkv_proj",
            out="self_attn.out_proj",
            mlp="feed_forward",
            up="feed_forward.w13",
            down="feed_forward.w2",
        )
        | gate_and_up("feed_forward.w13")
        | {MIXER: Place("short_conv.out_proj", "output")}
    ),
    kernel="self_attn.attn",
    returns_residual=True,
)
_TRANSFORMERS_LFM2: Final = TransformersFamily(
    model_types=("lfm2",),
    bodies=("model", ""),
    layers="layers",
    norm="embedding_norm",
    embed="embed_tokens",
    attention="self_attn",
    mlp="feed_forward",
    leaves=frozen(
        block_leaves(
            attention="self_attn.out_proj",
            qkv=QKV,
            out="self_attn.out_proj",
            mlp="feed_forward",
            up="feed_forward.w3",
            down="feed_forward.w2",
        )
        | {"mlp.gate": Place("feed_forward.w1", "output"), MIXER: Place("conv", "output")}
    ),
)

_MIXER_ALONE: Final = frozen({MIXER: Place("mixer", "output"), STATE: Place("mixer", "output")})
_MAMBA2: Final = EngineFamily(
    name="mamba2",
    model_classes=("Mamba2ForCausalLM",),
    layers="backbone.layers",
    final_norm="backbone.norm_f",
    leaves=_MIXER_ALONE,
    kernel="",
    returns_residual=True,
)
_TRANSFORMERS_MAMBA2: Final = TransformersFamily(
    model_types=("mamba2",),
    bodies=("backbone", ""),
    layers="layers",
    norm="norm_f",
    embed="embeddings",
    attention="",
    mlp="",
    leaves=_MIXER_ALONE,
)

# A block is one thing, called ``mixer``: recurrence, attention or an MLP.
_NEMOTRON_LEAVES: Final = block_leaves(
    attention="mixer.o_proj",
    qkv="mixer.qkv_proj",
    out="mixer.o_proj",
    mlp="mixer",
    up="mixer.up_proj",
    down="mixer.down_proj",
) | {
    "mlp.input": Place("mixer", "input", needs="mixer.up_proj"),
    "mlp.output": Place("mixer", "output", needs="mixer.up_proj"),
}
_NEMOTRON_H: Final = EngineFamily(
    name="nemotron_h",
    model_classes=("NemotronHForCausalLM",),
    layers="model.layers",
    final_norm="model.norm_f",
    leaves=frozen(
        _NEMOTRON_LEAVES
        | {
            MIXER: Place("mixer.out_proj", "output"),
            STATE: Place("mixer", "output", needs="mixer.out_proj"),
        }
    ),
    kernel="mixer.attn",
    returns_residual=True,
)
_TRANSFORMERS_NEMOTRON_H: Final = TransformersFamily(
    model_types=("nemotron_h",),
    bodies=("model", ""),
    layers="layers",
    norm="norm_f",
    embed="embeddings",
    attention="mixer",
    mlp="mixer",
    leaves=frozen(
        apart(_NEMOTRON_LEAVES, ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"))
        | {leaf: Place("mixer", "output", needs="mixer.in_proj") for leaf in (MIXER, STATE)}
    ),
)

# Several blocks call the same module for attention and MLP, so that no hook tells the blocks apart.
_ZAMBA2_MIXERS: Final = (Place("mamba", "output"), Place("mamba_decoder.mamba", "output"))
_ZAMBA2_LEAVES: Final = frozen({MIXER: _ZAMBA2_MIXERS, STATE: _ZAMBA2_MIXERS})
_ZAMBA2: Final = EngineFamily(
    name="zamba2",
    model_classes=("Zamba2ForCausalLM",),
    layers="model.layers",
    final_norm="model.final_layernorm",
    leaves=_ZAMBA2_LEAVES,
    kernel="",
)
_TRANSFORMERS_ZAMBA2: Final = TransformersFamily(
    model_types=("zamba2",),
    bodies=("model", ""),
    layers="layers",
    norm="final_layernorm",
    embed="",  # blocks with attention read the embeddings again
    attention="",
    mlp="",
    leaves=_ZAMBA2_LEAVES,
)

# Attention gates its output, by the other half of what the projection of queries returns.
_LINEAR_ATTENTION: Final = {MIXER: Place("linear_attn", "output")}
_QWEN3_NEXT: Final = EngineFamily(
    name="qwen3_next",
    model_classes=("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"),
    layers="model.layers",
    final_norm="model.norm",
    leaves=frozen({**engine_experts("mlp"), **_LINEAR_ATTENTION}),
    kernel="self_attn.attn",
    returns_residual=True,
    has_query_gates=True,
)
_QWEN3_5: Final = dataclasses.replace(
    _QWEN3_NEXT,
    name="qwen3_5",
    model_classes=("Qwen3_5ForCausalLM",),
    leaves=frozen({**LLAMA_LEAVES, **_LINEAR_ATTENTION}),
)
_TRANSFORMERS_QWEN3_NEXT: Final = dataclasses.replace(
    EXPERT_BLOCKS,
    model_types=("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    leaves=frozen({**ROUTED_LEAVES, **_LINEAR_ATTENTION}),
    has_query_gates=True,
)
_TRANSFORMERS_QWEN3_5: Final = dataclasses.replace(
    TRANSFORMERS_LLAMA,
    model_types=("qwen3_5", "qwen3_5_text"),
    leaves=frozen({**TRANSFORMERS_LLAMA_LEAVES, **_LINEAR_ATTENTION}),
    has_query_gates=True,
)

VLLM: Final = (_FALCON_H1, _GRANITE, _LFM2, _MAMBA2, _NEMOTRON_H, _QWEN3_NEXT, _QWEN3_5, _ZAMBA2)
"""The layouts in vLLM."""

TRANSFORMERS: Final = (
    _TRANSFORMERS_FALCON_H1,
    _TRANSFORMERS_GRANITE,
    _TRANSFORMERS_LFM2,
    _TRANSFORMERS_MAMBA2,
    _TRANSFORMERS_NEMOTRON_H,
    _TRANSFORMERS_QWEN3_NEXT,
    _TRANSFORMERS_QWEN3_5,
    _TRANSFORMERS_ZAMBA2,
)
"""The layouts in transformers."""
