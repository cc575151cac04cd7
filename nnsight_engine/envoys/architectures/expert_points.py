"""The chosen experts of a block as points: their ids and their weights, items of what its router returns.

A point has them by weight, the largest first. So its value is a new tensor, and its edits are carried over to
the router's value when the block hands over.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nnsight_engine.envoys.architectures.errors import PointValueError
from nnsight_engine.envoys.architectures.module_points import FlattenedPoint
from nnsight_engine.envoys.architectures.routing import ExpertWeights, by_weight, expert_factors
from nnsight_engine.families.transformers_family import RouterOrder


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
        logits, weights = value[order[0]], value[order[1]]
        if len(order) == len(("logits", "weights")):
            weights, ids = weights.topk(top_k, dim=-1)
        else:
            ids = value[order[2]]
        return cls(logits, weights, ids, order)

    def plain(self) -> tuple[torch.Tensor, ...]:
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
        forced = self.weights_of.of(logits, whole, factors).to(output.weights.dtype)
        weights = torch.where(changed, forced, output.weights)
        return output._replace(weights=weights, ids=torch.where(changed, whole, output.ids)).plain()

    def _check(self, ids: torch.Tensor, num_experts: int) -> None:
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
        output = self._output(value)
        weights = torch.empty_like(output.weights).scatter(-1, output.by_weight(), whole)
        return output._replace(weights=weights).plain()
