"""Location of the points in transformers models that mix attention with recurrence or convolution."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Final

from nnsight_engine.envoys.architectures.places import mlp_lacks
from nnsight_engine.envoys.architectures.table import (
    MIXER,
    QUERIES,
    ROUTER,
    SHARED,
    ArchitectureFamily,
    ModulePath,
    block_leaves,
    ordered,
    stream_leaves,
)

_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

_FALCON_H1: Final = ArchitectureFamily(
    model_types=("falcon_h1",),
    bodies=("model", ""),
    layers="layers",
    norm="final_layernorm",
    embed="",  # it scales embeddings
    attention="self_attn",
    mlp="feed_forward",
    leaves=types.MappingProxyType(
        block_leaves(
            qkv=_QKV,
            out="self_attn.o_proj",
            mlp=("feed_forward", "feed_forward"),
            up="feed_forward.up_proj",
            down="feed_forward.down_proj",
        )
        | {"mlp.gate": ModulePath("feed_forward.gate_proj", "output"), MIXER: ModulePath("mamba", "output")}
    ),
    order=ordered((MIXER, QUERIES), ("mlp.up", "mlp.gate")),
)

# The MLP is the one beside the experts, if there are experts.
_GRANITE: Final = ArchitectureFamily(
    model_types=("granitemoehybrid",),
    bodies=("model", ""),
    layers="layers",
    norm="norm",
    embed="",  # it scales embeddings
    attention="self_attn",
    mlp="shared_mlp",
    leaves=types.MappingProxyType(
        mlp_lacks(
            block_leaves(
                qkv=_QKV,
                out="self_attn.o_proj",
                mlp=("shared_mlp", "shared_mlp"),
                up="shared_mlp.input_linear",
                down="shared_mlp.output_linear",
            )
            | {
                "mlp.gate": ModulePath("shared_mlp.input_linear", "output", "gate"),
                "mlp.up": ModulePath("shared_mlp.input_linear", "output", "up"),
            },
            "block_sparse_moe",
        )
        | {
            ROUTER: ModulePath("block_sparse_moe.router", "output", operation="F_linear_0"),
            SHARED: ModulePath("shared_mlp", "output", needs="block_sparse_moe"),
            MIXER: ModulePath("mamba", "output"),
        }
    ),
    order=ordered((ROUTER, "mlp.input")),
    flattened=frozenset({ROUTER}),
)

_LFM2: Final = ArchitectureFamily(
    model_types=("lfm2",),
    bodies=("model", ""),
    layers="layers",
    norm="embedding_norm",
    embed="embed_tokens",
    attention="self_attn",
    mlp="feed_forward",
    leaves=types.MappingProxyType(
        block_leaves(
            qkv=_QKV,
            out="self_attn.out_proj",
            mlp=("feed_forward", "feed_forward"),
            up="feed_forward.w3",
            down="feed_forward.w2",
        )
        | {"mlp.gate": ModulePath("feed_forward.w1", "output"), MIXER: ModulePath("conv", "output")}
    ),
)

_MAMBA2: Final = ArchitectureFamily(
    model_types=("mamba2",),
    bodies=("backbone", ""),
    layers="layers",
    norm="norm_f",
    embed="embeddings",
    attention="",
    mlp="",
    leaves=types.MappingProxyType({**stream_leaves(), MIXER: ModulePath("mixer", "output")}),
)

# A block is one thing, called ``mixer``: recurrence, attention or an MLP.
_NEMOTRON_H: Final = ArchitectureFamily(
    model_types=("nemotron_h",),
    bodies=("model", ""),
    layers="layers",
    norm="norm_f",
    embed="embeddings",
    attention="mixer",
    mlp="mixer",
    leaves=types.MappingProxyType(
        block_leaves(
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            out="mixer.o_proj",
            mlp=("mixer", "mixer"),
            up="mixer.up_proj",
            down="mixer.down_proj",
        )
        | {
            "mlp.input": ModulePath("mixer", "input", needs="mixer.up_proj"),
            "mlp.output": ModulePath("mixer", "output", needs="mixer.up_proj"),
            MIXER: ModulePath("mixer", "output", needs="mixer.in_proj"),
        }
    ),
)

# Several blocks call the same module for attention and MLP.
_ZAMBA2: Final = ArchitectureFamily(
    model_types=("zamba2",),
    bodies=("model", ""),
    layers="layers",
    norm="final_layernorm",
    embed="",  # blocks with attention read the embeddings again
    attention="",
    mlp="",
    leaves=types.MappingProxyType({**stream_leaves(), MIXER: ModulePath("mamba", "output")}),
    other_leaves=types.MappingProxyType({MIXER: ModulePath("mamba_decoder.mamba", "output")}),
)

HYBRIDS: Final[Mapping[str, ArchitectureFamily]] = types.MappingProxyType(
    {
        model_type: family
        for family in (_FALCON_H1, _GRANITE, _LFM2, _MAMBA2, _NEMOTRON_H, _ZAMBA2)
        for model_type in family.model_types
    }
)
"""The layout of each ``model_type``."""
