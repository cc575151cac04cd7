"""Tables of decoders in the style of GPT-2: learned positions, one fused projection, a plain MLP.

Of each layout: its place in vLLM's modules, then in transformers'.
"""

from __future__ import annotations

from typing import Final

from nnsight_engine.core.leaves import NEURONS
from nnsight_engine.families.dense import QKV
from nnsight_engine.families.engine_family import EngineFamily
from nnsight_engine.families.places import block_leaves, frozen
from nnsight_engine.families.transformers_family import TransformersFamily

_GPT2: Final = EngineFamily(
    name="gpt2",
    model_classes=("GPT2LMHeadModel",),
    layers="transformer.h",
    final_norm="transformer.ln_f",
    leaves=frozen(
        block_leaves(
            attention="attn",
            qkv="attn.c_attn",
            out="attn.c_proj",
            mlp="mlp",
            up="mlp.c_fc",
            down="mlp.c_proj",
        )
    ),
    kernel="attn.attn",
)

# The MLP is two linear layers of the block itself, so its input and output are theirs.
_OPT: Final = EngineFamily(
    name="opt",
    model_classes=("OPTForCausalLM",),
    layers="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    project_out="model.decoder.project_out",
    leaves=frozen(
        block_leaves(
            attention="self_attn",
            qkv="self_attn.qkv_proj",
            out="self_attn.out_proj",
            mlp=("fc1", "fc2"),
            up="fc1",
            down="fc2",
        )
    ),
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

VLLM: Final = (_GPT2, _OPT, _GPT_NEOX)
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
        leaves=frozen(
            block_leaves(
                attention="attn.c_proj",
                qkv="attn.c_attn",
                out="attn.c_proj",
                mlp="mlp",
                up="mlp.c_fc",
                down="mlp.c_proj",
            )
        ),
    ),
    TransformersFamily(
        model_types=("opt",),
        bodies=("model.decoder", "decoder", ""),
        layers="layers",
        norm="final_layer_norm",
        embed="",
        attention="self_attn",
        mlp="",
        leaves=frozen(
            block_leaves(
                attention="self_attn.out_proj",
                qkv=QKV,
                out="self_attn.out_proj",
                mlp=("fc1", "fc2"),
                up="fc1",
                down="fc2",
            )
        ),
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
        is_qkv_per_head=True,
    ),
)
"""The layouts in transformers."""
