"""What transformers computes at every point of a checkpoint: the measure for the engine.

Ordinary forward hooks on the eager model, one prompt, no cache, at the paths that ``trees`` has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.families.trees import num_key_heads, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

    from tests.families.trees import Tree

ROUTER: Final = "moe.router"
EXPERTS: Final = "moe.experts"
WEIGHTS: Final = "moe.weights"
GATED: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models whose projection of queries returns a gate after each query."""


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
