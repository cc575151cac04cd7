"""What transformers computes at every point of a checkpoint: the measure for the engine.

Ordinary forward hooks on the eager model, one prompt, no cache. The module paths below are
transformers', written down apart from the engine's own tables, so that the two can disagree.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from pathlib import Path

    from torch import nn

ROUTER: Final = "moe.router"
EXPERTS: Final = "moe.experts"
WEIGHTS: Final = "moe.weights"
Split = tuple[int, ...]
GATED: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models whose projection of queries returns a gate after each query."""


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

TREES: Final[dict[str, Tree]] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
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
    **dict.fromkeys(("ernie4_5_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), _EXPERTS),
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
    "gpt2": Tree(
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
    "gpt_bigcode": Tree(
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


def load_reference_model(path: Path) -> nn.Module:
    """Load a checkpoint with transformers: float32, eager attention, evaluation mode."""
    sees = hasattr(AutoConfig.from_pretrained(path), "vision_config")
    model_class = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model: nn.Module = model_class.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def reference_activations(path: Path, prompt_ids: Sequence[int], **inputs: Any) -> dict[str, torch.Tensor]:
    """Return transformers' value at every point for one prompt.

    Args:
        path: A checkpoint that ``write_checkpoint`` wrote, or any of the same families.
        prompt_ids: The prompt's token ids.
        **inputs: The prompt's images, as the processor returns them.

    Returns:
        Point string (``layers.3.attn.q``, ``norm.output``, …) to float32 ``[tokens, *shape]``.
        ``norm.output`` is missing where the model has no final norm. ``layers.3.mixer.state`` is the state
        after the prompt, ``[heads, head_dim, state_size]``.
    """
    model = load_reference_model(path)
    whole: Any = model.config
    tree, config = tree_of(whole), whole.get_text_config()
    found: dict[str, torch.Tensor] = {}
    blocks = list(model.get_submodule(tree.layers).children())
    for index, block in enumerate(blocks):
        if tree.has_stream:
            _record(block, "input", [f"layers.{index}.input"], found)
            _record(block, "output", [f"layers.{index}.output"], found)
        modules = dict(block.named_modules())
        read_before = tree.inputs_of(modules)
        for leaf, module_path in read_before.items():
            _record(modules[module_path], "input", [f"layers.{index}.{leaf}"], found)
        for leaves, paths in tree.outputs.items():
            if leaves in read_before:
                continue
            points = [f"layers.{index}.{leaf}" for leaf in leaves.split("|")]
            for module_path in set(paths.split("|")) & modules.keys():
                split = splitter(config, len(points))
                _record(modules[module_path], "output", points, found, split)
        if tree.router and tree.router in modules:
            _record_choice(modules[tree.router], tree, config, f"layers.{index}", found)
    parent, _, name = tree.norm.rpartition(".")
    norm = getattr(model.get_submodule(parent), name)
    if norm is not None:
        _record(norm, "output", ["norm.output"], found)
    # Before the run without a cache, whose values the hooks keep.
    has_states = "mixer.output" in tree.outputs and not tree.hides_states
    states = reference_states(model, prompt_ids) if has_states else {}
    with torch.no_grad():
        logits = model(torch.tensor([list(prompt_ids)]), use_cache=False, **inputs).logits[0]
    if tree.has_stream:
        found["embed.output"] = found["layers.0.input"]
    found["logits"] = logits.float()
    return {point: _shaped(point, value, config) for point, value in found.items()} | states


def reference_states(model: Any, prompt_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the recurrent states in transformers' cache after a prompt, by point."""
    with torch.no_grad():
        output = model(torch.tensor([list(prompt_ids)]), use_cache=True)
    cache = output.get("past_key_values") or output.get("cache_params")
    return {
        f"layers.{layer}.mixer.state": states[0][0].clone()
        for layer, one in enumerate(cache.layers)
        if (states := getattr(one, "recurrent_states", {0: None}))[0] is not None
    }


def _record(
    module: nn.Module,
    side: str,
    points: list[str],
    found: dict[str, torch.Tensor],
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda rows: (rows,),
) -> None:
    """Hook one side of a module and keep copies of its rows under the points' names."""

    def keep(value: Any) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        rows = tensor.detach().flatten(2) if tensor.ndim == len("bthd") else tensor.detach()
        rows = rows.reshape(-1, rows.shape[-1])
        found.update({point: part.clone() for point, part in zip(points, split(rows), strict=True)})

    if side == "input":
        module.register_forward_pre_hook(
            lambda _module, args, kwargs: keep(args or kwargs["hidden_states"]), with_kwargs=True
        )
    else:
        module.register_forward_hook(lambda _module, _args, output: keep(output))


def _record_choice(
    router: nn.Module, tree: Tree, config: Any, layer: str, found: dict[str, torch.Tensor]
) -> None:
    """Hook a router and keep its logits, and the ids and weights of its experts by weight."""

    def keep(output: Any) -> None:
        logits, weights, ids = chosen(output, tree, config)
        found.setdefault(f"{layer}.{ROUTER}", logits.clone())
        found[f"{layer}.{WEIGHTS}"] = weights
        found[f"{layer}.{EXPERTS}"] = ids

    router.register_forward_hook(lambda _module, _args, output: keep(output))


def chosen(output: Any, tree: Tree, config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits that a router returns, and the weights and the ids of its experts by weight."""
    logits, weights = (output[index] for index in tree.router_order[:2])
    logits = logits.log() if tree.has_probabilities else logits
    has_ids = len(tree.router_order) == len(("logits", "weights", "ids"))
    weights, order = weights.topk(weights.shape[-1] if has_ids else config.num_experts_per_tok, dim=-1)
    return logits, weights, output[tree.router_order[2]].gather(-1, order) if has_ids else order


def with_choice(output: Any, tree: Tree, weights: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
    """Return what a router returns, with other experts."""
    items = list(output)
    if len(tree.router_order) == len(("logits", "weights", "ids")):
        items[tree.router_order[1]], items[tree.router_order[2]] = weights, ids
    else:
        items[tree.router_order[1]] = torch.zeros_like(items[0]).scatter(-1, ids, weights)
    return tuple(items)


def splitter(config: Any, num_parts: int) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    """Return how a fused projection's rows come apart into q, k, v or gate, up."""

    def by_key_head(rows: torch.Tensor) -> Sequence[torch.Tensor]:
        # The queries of each key head, the key and the value, side by side.
        heads, kv_heads = config.num_attention_heads, num_key_heads(config)
        packed = rows.view(rows.shape[0], kv_heads, heads // kv_heads + 2, -1)
        return packed[:, :, :-2], packed[:, :, -2], packed[:, :, -1]

    def in_order(rows: torch.Tensor) -> Sequence[torch.Tensor]:
        if num_parts != len("qkv"):
            return rows.chunk(num_parts, dim=-1)
        heads, kv_heads = config.num_attention_heads, num_key_heads(config)
        head_dim = rows.shape[-1] // (heads + 2 * kv_heads)
        return torch.split(rows, [count * head_dim for count in (heads, kv_heads, kv_heads)], dim=-1)

    is_packed = config.model_type in {"bloom", "falcon", "gpt_neox"} and num_parts == len("qkv")
    return by_key_head if is_packed else in_order


def without_gates(rows: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the queries ``[..., heads, head_dim]`` of what a projection with gates returns, as a view."""
    queries: torch.Tensor = rows.unflatten(-1, (config.num_attention_heads, 2, -1))[..., 0, :]
    return queries


def _shaped(point: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """Give attention leaves their ``[tokens, heads, head_dim]`` shape."""
    leaf = point.rpartition(".")[2]
    if ".attn." not in point or leaf in {"output", "latent"}:
        return value
    heads = config.num_attention_heads
    if leaf in {"k", "v"}:
        of_layer = config
        if hasattr(config, "per_layer_config"):
            of_layer = config.per_layer_config[int(point.split(".")[1])]
        heads = num_key_heads(of_layer)
    if leaf == "q" and config.model_type in GATED:
        return without_gates(value, config)
    return value.reshape(value.shape[0], heads, -1)
