"""Location of the points in models that mix attention with recurrence or convolution.

A block of such a model has ``mixer.output`` where it has a recurrent or convolutional mixer, and attention's
leaves where it has attention; in most models it has one of the two.
"""

from __future__ import annotations

import types
from typing import Final

from nnsight_engine.envoys.architectures.places import mlp_lacks
from nnsight_engine.envoys.architectures.table import MIXER, ROUTER, SHARED, ordered
from nnsight_engine.vllm_backend.engine_family import EngineFamily, HookSpec, block_leaves, gate_and_up

_FALCON_H1_LEAVES: Final = types.MappingProxyType(
    block_leaves(
        attention="self_attn.o_proj",  # what attention's own module returns is scaled by the block
        qkv="self_attn.qkv_proj",
        out="self_attn.o_proj",
        mlp="feed_forward",
        up="feed_forward.gate_up_proj",
        down="feed_forward.down_proj",
    )
    | gate_and_up("feed_forward.gate_up_proj")
    | {
        MIXER: HookSpec("mamba.mamba", "output"),
    }
)

# Beside experts, the MLP is the shared expert, and no module returns the sum of both.
_GRANITE_LEAVES: Final = types.MappingProxyType(
    mlp_lacks(
        block_leaves(
            attention="self_attn",
            qkv="self_attn.qkv_proj",
            out="self_attn.o_proj",
            mlp="shared_mlp",
            up="shared_mlp.input_linear",
            down="shared_mlp.output_linear",
        )
        | gate_and_up("shared_mlp.input_linear"),
        "block_sparse_moe",
    )
    | {
        ROUTER: HookSpec("block_sparse_moe.gate", "output"),
        SHARED: HookSpec("shared_mlp", "output", needs="block_sparse_moe"),
        MIXER: HookSpec("mamba", "output"),
    }
)

# The convolution writes into a tensor that it is given, so the output of its projection is used.
_LFM2_LEAVES: Final = types.MappingProxyType(
    block_leaves(
        attention="self_attn",
        qkv="self_attn.qkv_proj",
        out="self_attn.out_proj",
        mlp="feed_forward",
        up="feed_forward.w13",
        down="feed_forward.w2",
    )
    | gate_and_up("feed_forward.w13")
    | {
        MIXER: HookSpec("short_conv.out_proj", "output"),
    }
)

# A block is one thing, called ``mixer``: recurrence, attention or an MLP.
_NEMOTRON_H_LEAVES: Final = types.MappingProxyType(
    block_leaves(
        attention="mixer.o_proj",
        qkv="mixer.qkv_proj",
        out="mixer.o_proj",
        mlp="mixer",
        up="mixer.up_proj",
        down="mixer.down_proj",
    )
    | {
        "mlp.input": HookSpec("mixer", "input", needs="mixer.up_proj"),
        "mlp.output": HookSpec("mixer", "output", needs="mixer.up_proj"),
        MIXER: HookSpec("mixer.out_proj", "output"),
    }
)

HYBRIDS: Final = (
    EngineFamily(
        name="falcon_h1",
        model_classes=("FalconH1ForCausalLM",),
        layers="model.layers",
        final_norm="model.final_layernorm",
        leaves=_FALCON_H1_LEAVES,
        kernel="self_attn.attn",
        hidden_index=1,
    ),
    EngineFamily(
        name="granitemoehybrid",
        model_classes=("GraniteMoeHybridForCausalLM",),
        layers="model.layers",
        final_norm="model.norm",
        leaves=_GRANITE_LEAVES,
        order=ordered((ROUTER, "mlp.input")),
        kernel="self_attn.attn",
        returns_residual=True,
        has_unused_residual=True,
    ),
    EngineFamily(
        name="lfm2",
        model_classes=("Lfm2ForCausalLM",),
        layers="model.layers",
        final_norm="model.embedding_norm",
        leaves=_LFM2_LEAVES,
        kernel="self_attn.attn",
        returns_residual=True,
    ),
    EngineFamily(
        name="mamba2",
        model_classes=("Mamba2ForCausalLM",),
        layers="backbone.layers",
        final_norm="backbone.norm_f",
        leaves=types.MappingProxyType({MIXER: HookSpec("mixer", "output")}),
        kernel="",
        returns_residual=True,
    ),
    EngineFamily(
        name="nemotron_h",
        model_classes=("NemotronHForCausalLM",),
        layers="model.layers",
        final_norm="model.norm_f",
        leaves=_NEMOTRON_H_LEAVES,
        kernel="mixer.attn",
        returns_residual=True,
    ),
    # Several blocks call the same module for attention and MLP, so that no hook tells the blocks apart.
    EngineFamily(
        name="zamba2",
        model_classes=("Zamba2ForCausalLM",),
        layers="model.layers",
        final_norm="model.final_layernorm",
        leaves=types.MappingProxyType({MIXER: HookSpec("mamba", "output")}),
        other_leaves=types.MappingProxyType({MIXER: HookSpec("mamba_decoder.mamba", "output")}),
        kernel="",
    ),
)
"""The tables, one per layout."""
