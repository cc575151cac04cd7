"""Other experts for the tokens of a transformers model: the measure for what forced experts do.

The weights of experts are written down here apart from the engine's own table, so that the two can disagree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from tests.families.reference import chosen, with_choice

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from tests.families.trees import Tree

UNFORCED: Final = frozenset({"phimoe"})
"""Model types whose routers weight a choice by more than its logits, so that none can be forced."""
_SIGMOID: Final = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "llama4_text", "minimax_m2")
_NOT_NORMALIZED: Final = ("deepseek_v2", "llama4_text")


def weights_of(
    config: Any, logits: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weights that a model's router gives to experts, ``[tokens, top_k]``.

    Args:
        config: The model's config.
        logits: The router's logits, ``[tokens, experts]``.
        ids: The experts, ``[tokens, top_k]``.
        factors: The router's factor for each expert; None for none.
    """
    is_sigmoid = config.model_type in _SIGMOID
    scores = torch.sigmoid(logits) if is_sigmoid else torch.softmax(logits, dim=-1)
    weights = torch.stack([row[chosen] for row, chosen in zip(scores, ids, strict=True)])
    if config.model_type not in _NOT_NORMALIZED and getattr(config, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if factors is not None:
        weights = weights * torch.stack([factors[chosen] for chosen in ids])
    return weights * getattr(config, "routed_scaling_factor", 1.0)


def factors_of(block: nn.Module, tree: Tree) -> torch.Tensor | None:
    """Return the factors of a block's router for its experts; None without."""
    return getattr(block.get_submodule(tree.router), "per_expert_scale", None)


def force(
    block: nn.Module, tree: Tree, config: Any, change: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    """Have a block's router return other experts: its own, by weight, with their ids changed."""

    factors = factors_of(block, tree)

    def edit(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        logits, weights, ids = chosen(output, tree, config)
        change(ids)
        return with_choice(output, tree, weights_of(config, logits, ids, factors).to(weights.dtype), ids)

    return block.get_submodule(tree.router).register_forward_hook(edit)
