"""The weights of experts that a write forces: those that the router would have given; for both engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

_SOFTMAX: Final = (
    *("ernie4_5_moe", "gemma4_text", "gpt_oss", "granitemoe", "granitemoeshared", "mixtral"),
    "qwen3_5_moe_text",
)
_SOFTMAX_BY_CONFIG: Final = ("olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next")
_SIGMOID_BY_CONFIG: Final = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """How a model weights the experts that it has chosen.

    Attributes:
        is_sigmoid: Whether an expert's score is the sigmoid of its logit, instead of the softmax over all.
        is_normalized: Whether the scores of the chosen experts are divided by their sum.
        normalized_key: The config's field that decides ``is_normalized`` instead; empty for none.
    """

    is_sigmoid: bool = False
    is_normalized: bool = True
    scale_key: str = ""
    normalized_key: str = ""


_ROUTINGS: Final[Mapping[str, Routing]] = MappingProxyType(
    {
        **dict.fromkeys(_SOFTMAX, Routing()),
        **dict.fromkeys(_SOFTMAX_BY_CONFIG, Routing(normalized_key="norm_topk_prob")),
        **dict.fromkeys(
            _SIGMOID_BY_CONFIG,
            Routing(is_sigmoid=True, scale_key="routed_scaling_factor", normalized_key="norm_topk_prob"),
        ),
        "deepseek_v2": Routing(is_normalized=False, scale_key="routed_scaling_factor"),
        "llama4_text": Routing(is_sigmoid=True, is_normalized=False),
        "minimax_m2": Routing(is_sigmoid=True),
    }
)
"""By ``model_type``; a model that is not listed does not let experts be forced."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of any experts of one model, see ``Routing``; ``scale`` is a factor on all of them."""

    is_sigmoid: bool
    is_normalized: bool
    scale: float

    def of(
        self, logits: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the weights of experts, float32 ``[..., top_k]``, by logits ``[..., experts]``.

        ``ids``: int64 ``[..., top_k]``, within range; ``factors``: the layer's on each expert's weight,
        ``[experts]``.
        """
        scores = logits.float()
        scores = scores.sigmoid() if self.is_sigmoid else scores.softmax(dim=-1)
        chosen = scores.gather(-1, ids)
        if self.is_normalized:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return chosen * self.scale if factors is None else chosen * self.scale * factors[ids].float()


def expert_weights(config: Any) -> ExpertWeights | None:
    """Return how a model weights experts, by its text config; None if it is not known."""
    routing = _ROUTINGS.get(str(getattr(config, "model_type", "")))
    if routing is None:
        return None
    is_normalized = routing.is_normalized
    if routing.normalized_key:
        is_normalized = bool(getattr(config, routing.normalized_key))
    scale = float(getattr(config, routing.scale_key)) if routing.scale_key else 1.0
    return ExpertWeights(routing.is_sigmoid, is_normalized, scale)


def expert_factors(router: Any) -> torch.Tensor | None:
    """Return a router's factors on the weights of experts, ``[experts]``; None but for Gemma 4."""
    factors: torch.Tensor | None = getattr(router, "per_expert_scale", None)
    return factors


def num_chosen(config: Any) -> int:
    # Gemma 4 has another name for it.
    chosen: int = (
        config.num_experts_per_tok if hasattr(config, "num_experts_per_tok") else config.top_k_experts
    )
    return chosen


def by_weight(weights: torch.Tensor) -> torch.Tensor:
    """Return the order of experts by weight, the largest first, equal ones as they are, ``[..., top_k]``."""
    return weights.argsort(dim=-1, descending=True, stable=True)
