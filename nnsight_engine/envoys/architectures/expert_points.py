"""The chosen experts of a block as points: their ids and their weights, items of what its router returns.

A point has them by weight, the largest first. So its value is a new tensor, and its edits are carried over to
the router's value when the block hands over. Experts that a write forces have the weights that the router
would have given; both engines share that code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nnsight_engine.envoys.architectures.module_points import FlattenedPoint
from nnsight_engine.envoys.architectures.named_points import PointValueError
from nnsight_engine.families.layout import RouterOrder

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

    def weights_of(
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
    """Return the number of experts that a router chooses for each token."""
    # Gemma 4 has another name for it.
    chosen: int = (
        config.num_experts_per_tok if hasattr(config, "num_experts_per_tok") else config.top_k_experts
    )
    return chosen


def by_weight(weights: torch.Tensor) -> torch.Tensor:
    """Return the order of experts by weight, the largest first, equal ones as they are, ``[..., top_k]``."""
    return weights.argsort(dim=-1, descending=True, stable=True)


class RouterOutput(NamedTuple):
    """A router's values: logits ``[tokens, experts]``, weights and ids ``[tokens, top_k]``.

    ``order`` has their indices in its tuple. Without one for ids, the tuple has weights of all experts, zero
    for those that are not chosen.
    """

    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    order: RouterOrder

    @classmethod
    def of(cls, value: Any, order: RouterOrder, top_k: int) -> RouterOutput:
        """Read a router's tuple, see the class; without ids in it, they are those of the largest weights."""
        logits, weights = value[order[0]], value[order[1]]
        if len(order) == len(("logits", "weights")):
            weights, ids = weights.topk(top_k, dim=-1)
        else:
            ids = value[order[2]]
        return cls(logits, weights, ids, order)

    def plain(self) -> tuple[torch.Tensor, ...]:
        """Return the values as a tuple of the router's own form."""
        items = (self.logits, self.weights, self.ids)
        if len(self.order) < len(items):
            items = (self.logits, torch.zeros_like(self.logits).scatter(-1, self.ids, self.weights), self.ids)
        return tuple(items[self.order.index(index)] for index in range(len(self.order)))

    def by_weight(self) -> torch.Tensor:
        return by_weight(self.weights)


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertPoint(FlattenedPoint):
    """A point with a value for each chosen expert; without ``weights_of``, none can be forced."""

    weights_of: ExpertWeights | None
    order: RouterOrder
    has_probabilities: bool

    _is_computed: ClassVar[bool] = True

    def _output(self, value: Any) -> RouterOutput:
        return RouterOutput.of(value, self.order, self.shape[-1])


class ExpertIdsPoint(ExpertPoint):
    """The ids, int64. Other ids get the weights that the router would have given them."""

    __slots__ = ()

    def _whole(self, value: Any) -> torch.Tensor:
        output = self._output(value)
        return output.ids.gather(-1, output.by_weight())

    def _with_whole(self, value: Any, whole: torch.Tensor) -> Any:
        """Return the router's value with these ids, sorted by weight, and the weights that go with them."""
        output = self._output(value)
        changed = (whole != self._whole(value)).any(dim=-1, keepdim=True)
        if not isinstance(whole, FakeTensor):
            if not bool(changed.any()):
                return value
            self._check(whole, output.logits.shape[-1])
        if self.weights_of is None:
            return value
        logits = output.logits.log() if self.has_probabilities else output.logits
        factors = expert_factors(self.envoy._module)
        forced = self.weights_of.weights_of(logits, whole, factors).to(output.weights.dtype)
        weights = torch.where(changed, forced, output.weights)
        return output._replace(weights=weights, ids=torch.where(changed, whole, output.ids)).plain()

    def _check(self, ids: torch.Tensor, num_experts: int) -> None:
        """Raise PointValueError if experts cannot be forced in this model, or if an id is out of range."""
        if self.weights_of is None:
            raise PointValueError(
                f"{self.name} cannot be written: the weights that this model gives to other experts are not "
                "known. Write moe.router before it, or moe.weights behind it"
            )
        if not (int(ids.min()) >= 0 and int(ids.max()) < num_experts):
            raise PointValueError(
                f"{self.name} takes integers from 0 to {num_experts - 1}, got {int(ids.min())} to "
                f"{int(ids.max())}"
            )


class ExpertWeightsPoint(ExpertPoint):
    """The weights, with all constant factors of the model."""

    __slots__ = ()

    def _whole(self, value: Any) -> torch.Tensor:
        output = self._output(value)
        return output.weights.gather(-1, output.by_weight())

    def _with_whole(self, value: Any, whole: torch.Tensor) -> Any:
        """Return the router's value with these weights, which are sorted as ``_whole`` returns them."""
        output = self._output(value)
        weights = torch.empty_like(output.weights).scatter(-1, output.by_weight(), whole)
        return output._replace(weights=weights).plain()
