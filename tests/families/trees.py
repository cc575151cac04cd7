"""Module paths of every architecture in transformers, below which ``reference`` finds the points.

They are written down apart from the engine's own tables, so that the two can disagree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, Final


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """Module paths of one architecture in transformers.

    Attributes:
        layers: Path of the blocks' list.
        norm: Path of the final norm.
        inputs: Leaf to the module, below a block, whose input it is. A block has those whose modules it has.
        outputs: Leaf to the module whose output it is; ``a|b|c`` where the output holds several. Where blocks
            differ, several modules ``a|b``, of which a block has one.
        router: The module that returns logits, weights and ids of experts, or empty.
        router_order: The index of each of these in what the module returns; without ids, weights of all.
        has_probabilities: Whether it returns the softmax of the logits in their place.
        apart: Where one projection returns keys that are values, too: the module whose input each is.
        has_pattern: Whether attention's probabilities are a point.
        hides_states: Whether the recurrent states of mixers are no point.
        has_stream: Whether blocks pass on one residual stream, and not several.
    """

    layers: str
    norm: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    router: str = ""
    router_order: tuple[int, ...] = (0, 1, 2)
    has_probabilities: bool = False
    apart: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_pattern: bool = True
    hides_states: bool = False
    has_stream: bool = True

    def inputs_of(self, modules: Container[str]) -> dict[str, str]:
        """Return the leaves that are inputs in a block with these modules."""
        is_one = bool(self.apart) and self.outputs["attn.v"] not in modules
        found = {**self.inputs, **(self.apart if is_one else {})}
        return {leaf: path for leaf, path in found.items() if path in modules}


_LLAMA: Final = Tree(
    layers="model.layers",
    norm="model.norm",
    inputs={"attn.heads": "self_attn.o_proj", "mlp.input": "mlp", "mlp.act": "mlp.down_proj"},
    outputs={
        "attn.output": "self_attn.o_proj",
        "attn.q": "self_attn.q_proj",
        "attn.k": "self_attn.k_proj",
        "attn.v": "self_attn.v_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.output": "mlp",
    },
)

_GEMMA4: Final = dataclasses.replace(
    _LLAMA,
    outputs={**_LLAMA.outputs, "moe.router": "router.proj", "moe.output": "experts"},
    router="router",
    has_probabilities=True,
    apart={"attn.k": "self_attn.k_norm", "attn.v": "self_attn.v_norm"},
)
_UNGATED: Final = {leaf: path for leaf, path in _LLAMA.outputs.items() if leaf not in {"mlp.gate", "mlp.up"}}
_GLM: Final = dataclasses.replace(_LLAMA, outputs={**_UNGATED, "mlp.gate|mlp.up": "mlp.gate_up_proj"})
_EXPERTS: Final = dataclasses.replace(
    _LLAMA, outputs={**_LLAMA.outputs, "moe.output": "mlp.experts"}, router="mlp.gate"
)


def _tree(out: str, *, up: str, down: str, norm: str = "model.norm") -> Tree:
    """Return a tree with separate projections, and an MLP without a gate."""
    return Tree(
        layers="model.layers",
        norm=norm,
        inputs={"attn.heads": out, "mlp.input": "mlp", "mlp.act": down},
        outputs={
            "attn.output": out,
            **{f"attn.{part}": f"self_attn.{part}_proj" for part in "qkv"},
            "mlp.up": up,
            "mlp.output": "mlp",
        },
    )


def _hybrid(mlp: str, *, mixer: str, norm: str) -> Tree:
    """Return a tree with Llama's attention, an MLP of another name, and a mixer beside."""
    return Tree(
        layers="model.layers",
        norm=norm,
        inputs={leaf: path.replace("mlp", mlp) for leaf, path in _LLAMA.inputs.items()},
        outputs={
            **{leaf: path.replace("mlp", mlp) for leaf, path in _LLAMA.outputs.items()},
            "mixer.output": f"{mixer}.out_proj",
        },
    )


_FUSED: Final = Tree(
    layers="transformer.h",
    norm="transformer.ln_f",
    inputs={"attn.heads": "self_attention.dense", "mlp.input": "mlp", "mlp.act": "mlp.dense_4h_to_h"},
    outputs={
        "attn.output": "self_attention.dense",
        "attn.q|attn.k|attn.v": "self_attention.query_key_value",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.output": "mlp.dense_4h_to_h",
    },
)

_STREAM: Final = Tree(layers="model.layers", norm="model.norm", inputs={}, outputs={}, has_pattern=False)
"""What a model without a table has."""

TREES: Final[dict[str, Tree]] = {
    **dict.fromkeys(("flex_olmo", "hunyuan_v1_moe"), _STREAM),
    "lfm2_moe": dataclasses.replace(_STREAM, norm="model.embedding_norm"),
    **dict.fromkeys(
        (
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
            ),
            *(
                "ernie4_5",
                "hunyuan_v1_dense",
                "seed_oss",
                "cohere",
                "cohere2",
                "exaone4",
                "granite",
                "olmo",
                "olmo2",
                "olmo3",
                "smollm3",
                "stablelm",
            ),
        ),
        _LLAMA,
    ),
    "gemma3n_text": dataclasses.replace(_LLAMA, has_stream=False),
    "gemma4_text": _GEMMA4,
    "idefics3": dataclasses.replace(_LLAMA, layers="model.text_model.layers", norm="model.text_model.norm"),
    **dict.fromkeys(("ernie4_5_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), _EXPERTS),
    "phimoe": dataclasses.replace(_EXPERTS, router="mlp.router"),
    "granitemoeshared": dataclasses.replace(
        _EXPERTS,
        inputs={leaf: path for leaf, path in _EXPERTS.inputs.items() if leaf != "mlp.input"},
        outputs={
            **{leaf: path for leaf, path in _EXPERTS.outputs.items() if leaf != "mlp.output"},
            "mlp.input": "post_attention_layernorm",
            "moe.output": "block_sparse_moe.experts",
            "moe.shared.output": "shared_mlp",
        },
        router="block_sparse_moe.router",
        router_order=(2, 1, 0),
    ),
    "llama4_text": dataclasses.replace(
        _LLAMA,
        inputs={leaf: path.replace("mlp", "feed_forward") for leaf, path in _LLAMA.inputs.items()},
        outputs={
            leaf: path.replace("mlp", "feed_forward")
            for leaf, path in _LLAMA.outputs.items()
            if leaf not in {"attn.q", "attn.k"}
        },
        router="feed_forward.router",
        router_order=(1, 0),
        has_pattern=False,
    ),
    "glm4_moe": dataclasses.replace(
        _EXPERTS, outputs={**_EXPERTS.outputs, "moe.shared.output": "mlp.shared_experts"}
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        dataclasses.replace(
            _EXPERTS,
            outputs={
                **{leaf: path for leaf, path in _EXPERTS.outputs.items() if leaf[:-1] != "attn."},
                "attn.latent": "self_attn.kv_a_layernorm",
                "moe.shared.output": "mlp.shared_experts",
            },
            has_pattern=False,
        ),
    ),
    "gpt_oss": dataclasses.replace(_EXPERTS, router="mlp.router", has_pattern=False),
    "granitemoe": dataclasses.replace(
        _EXPERTS,
        inputs={**_EXPERTS.inputs, "mlp.input": "block_sparse_moe"},
        outputs={
            **_EXPERTS.outputs,
            "moe.output": "block_sparse_moe.experts",
            "mlp.output": "block_sparse_moe",
        },
        router="block_sparse_moe.router",
        router_order=(2, 1, 0),
    ),
    **dict.fromkeys(("glm", "glm4"), _GLM),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe_text"),
        dataclasses.replace(
            _EXPERTS, outputs={**_EXPERTS.outputs, "mixer.output": "linear_attn"}, hides_states=True
        ),
    ),
    "qwen3_5_text": dataclasses.replace(
        _LLAMA, outputs={**_LLAMA.outputs, "mixer.output": "linear_attn"}, hides_states=True
    ),
    "falcon_h1": _hybrid("feed_forward", mixer="mamba", norm="model.final_layernorm"),
    "granitemoehybrid": dataclasses.replace(
        _hybrid("shared_mlp", mixer="mamba", norm="model.norm"),
        inputs={
            "attn.heads": "self_attn.o_proj",
            "mlp.input": "shared_mlp",
            "mlp.act": "shared_mlp.output_linear",
        },
        outputs={
            **{leaf: path for leaf, path in _UNGATED.items() if leaf != "mlp.output"},
            "mlp.gate|mlp.up": "shared_mlp.input_linear",
            "mlp.output": "shared_mlp",
            "mixer.output": "mamba.out_proj",
        },
    ),
    "lfm2": Tree(
        layers="model.layers",
        norm="model.embedding_norm",
        inputs={
            "attn.heads": "self_attn.out_proj",
            "mlp.input": "feed_forward",
            "mlp.act": "feed_forward.w2",
        },
        outputs={
            **{f"attn.{part}": f"self_attn.{part}_proj" for part in "qkv"},
            "attn.output": "self_attn.out_proj",
            "mlp.gate": "feed_forward.w1",
            "mlp.up": "feed_forward.w3",
            "mlp.output": "feed_forward",
            "mixer.output": "conv.out_proj",
        },
    ),
    "mamba2": Tree(
        layers="backbone.layers",
        norm="backbone.norm_f",
        inputs={},
        outputs={"mixer.output": "mixer.out_proj"},
        has_pattern=False,
    ),
    "nemotron_h": Tree(
        layers="model.layers",
        norm="model.norm_f",
        inputs={"attn.heads": "mixer.o_proj", "mlp.input": "mixer.up_proj", "mlp.act": "mixer.down_proj"},
        outputs={
            **{f"attn.{part}": f"mixer.{part}_proj" for part in "qkv"},
            "attn.output": "mixer.o_proj",
            "mlp.up": "mixer.up_proj",
            "mlp.output": "mixer.down_proj",
            "mixer.output": "mixer.out_proj",
        },
    ),
    "zamba2": Tree(
        layers="model.layers",
        norm="model.final_layernorm",
        inputs={},
        outputs={"mixer.output": "mamba.out_proj|mamba_decoder.mamba.out_proj"},
        has_pattern=False,
    ),
    **dict.fromkeys(
        ("apertus", "arcee", "nemotron"),
        _tree("self_attn.o_proj", up="mlp.up_proj", down="mlp.down_proj"),
    ),
    "phi": _tree("self_attn.dense", up="mlp.fc1", down="mlp.fc2", norm="model.final_layernorm"),
    "starcoder2": _tree("self_attn.o_proj", up="mlp.c_fc", down="mlp.c_proj"),
    "phi3": Tree(
        layers="model.layers",
        norm="model.norm",
        inputs=_LLAMA.inputs,
        outputs={
            "attn.output": "self_attn.o_proj",
            "attn.q|attn.k|attn.v": "self_attn.qkv_proj",
            "mlp.gate|mlp.up": "mlp.gate_up_proj",
            "mlp.output": "mlp",
        },
    ),
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode"),
        Tree(
            layers="transformer.h",
            norm="transformer.ln_f",
            inputs={"attn.heads": "attn.c_proj", "mlp.input": "mlp", "mlp.act": "mlp.c_proj"},
            outputs={
                "attn.output": "attn.c_proj",
                "attn.q|attn.k|attn.v": "attn.c_attn",
                "mlp.up": "mlp.c_fc",
                "mlp.output": "mlp",
            },
        ),
    ),
    "opt": Tree(
        layers="model.decoder.layers",
        norm="model.decoder.final_layer_norm",
        inputs={"attn.heads": "self_attn.out_proj", "mlp.input": "fc1", "mlp.act": "fc2"},
        outputs={
            "attn.output": "self_attn.out_proj",
            "attn.q": "self_attn.q_proj",
            "attn.k": "self_attn.k_proj",
            "attn.v": "self_attn.v_proj",
            "mlp.up": "fc1",
            "mlp.output": "fc2",
        },
    ),
    "gptj": Tree(
        layers="transformer.h",
        norm="transformer.ln_f",
        inputs={"attn.heads": "attn.out_proj", "mlp.input": "mlp", "mlp.act": "mlp.fc_out"},
        outputs={
            "attn.output": "attn.out_proj",
            **{f"attn.{part}": f"attn.{part}_proj" for part in "qkv"},
            "mlp.up": "mlp.fc_in",
            "mlp.output": "mlp",
        },
    ),
    "bloom": _FUSED,
    "falcon": dataclasses.replace(_FUSED, has_pattern=False),
    # vLLM adds biases where no module returns the sum.
    "falcon_biased": dataclasses.replace(_FUSED, outputs={}, has_pattern=False),
    "gpt_neox": Tree(
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        inputs={"attn.heads": "attention.dense", "mlp.input": "mlp", "mlp.act": "mlp.dense_4h_to_h"},
        outputs={
            "attn.output": "attention.dense",
            "attn.q|attn.k|attn.v": "attention.query_key_value",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.output": "mlp",
        },
    ),
}


def tree_of(config: Any) -> Tree:
    """Return the module paths of a model."""
    is_biased = config.model_type == "falcon" and config.bias
    return TREES["falcon_biased" if is_biased else config.model_type]


def num_key_heads(config: Any) -> int:
    """Return the number of heads of keys and values."""
    num_heads: int = config.num_attention_heads
    if config.model_type == "falcon":
        is_single = config.multi_query and not config.new_decoder_architecture
        return 1 if is_single else config.num_kv_heads
    return getattr(config, "num_key_value_heads", None) or num_heads
