"""Values inside vLLM's layers of experts that no module takes or returns, as modules below the ``MoERunner``.

Invariant: rows whose value nobody changed keep vLLM's own numbers, bit by bit, and its own order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, cast

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from nnsight_engine.envoys.architectures.routing import (
    ExpertWeights,
    by_weight,
    expert_factors,
    expert_weights,
)

INNER: Final = "inner"
"""Name of the added module below a runner."""


class Router(Protocol):
    top_k: int
    eplb_state: Any
    select_experts: Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Runner(Protocol):
    is_monolithic: bool
    moe_config: Any
    router: Router
    routed_scaling_factor: float
    shared_experts: object
    _maybe_apply_routed_scale_to_output: Callable[..., tuple[torch.Tensor | None, torch.Tensor]]


class InnerValue(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value

    @property
    def is_watched(self) -> bool:
        """Whether a hook or a probe is on the module; never while a step is compiled."""
        return bool(self._forward_hooks) or "_compiled_call_impl" in vars(self)


class ExpertChoice(InnerValue):
    """The ids or the weights of chosen experts, which each tensor-parallel rank has whole."""


class InnerExperts(nn.Module):
    """The values inside one layer of experts; replaces two functions of its runner.

    Attributes:
        ids: The ids of the chosen experts, int64 ``[tokens, top_k]``, by weight, the largest first.
        weights: Their weights, ``[tokens, top_k]``, with the model's constant factor.
        routed: What the routed experts add, ``[tokens, hidden]``; under tensor parallelism a rank's part.
        shared: What the shared experts add, likewise.
    """

    def __init__(
        self,
        runner: Runner,
        weights_of: ExpertWeights | None,
        factors: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> None:
        super().__init__()
        self.weights_of = weights_of
        self._factors = factors
        self.num_experts = runner.moe_config.num_logical_experts
        self.top_k = runner.router.top_k
        self._scale = runner.routed_scaling_factor
        if _has_choice(runner):
            self.ids = ExpertChoice()
            self.weights = ExpertChoice()
            self._select = runner.router.select_experts
            runner.router.select_experts = self._select_experts
        is_shared = runner.shared_experts is not None
        # In float16 vLLM divides what shared experts add, to avoid an overflow, and scales the sum later.
        if not (is_shared and self._scale != 1.0 and runner.moe_config.in_dtype is torch.float16):
            self.routed = InnerValue()
            if is_shared:
                self.shared = InnerValue()
            self._scale_outputs = runner._maybe_apply_routed_scale_to_output  # noqa: SLF001 - vLLM's only seam
            runner._maybe_apply_routed_scale_to_output = self._scaled_outputs  # noqa: SLF001 - as above

    def _select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self._select(hidden_states, router_logits, *args, **kwargs)
        if torch.compiler.is_compiling() or not (self.ids.is_watched or self.weights.is_watched):
            return weights, ids
        weights, ids = self._with_ids(router_logits[..., : self.num_experts], weights, ids)
        return self._with_weights(weights), ids

    def _with_ids(
        self, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = ids.gather(-1, by_weight(weights)).long()
        chosen = self.ids(given.clone())
        if self.weights_of is None:
            return weights, ids
        changed = (chosen != given).any(dim=-1, keepdim=True)
        # Whoever writes ids checks them. Kernels use them as indices, so that a mistake would be fatal.
        chosen = chosen.clamp(0, self.num_experts - 1)
        forced = self.weights_of.of(logits, chosen, self._factors()) / self._scale
        weights = torch.where(changed, forced.to(weights.dtype), weights)
        return weights, torch.where(changed, chosen.to(ids.dtype), ids)

    def _with_weights(self, weights: torch.Tensor) -> torch.Tensor:
        order = by_weight(weights)
        given = weights.gather(-1, order) * self._scale
        left = self.weights(given.clone())
        changed = (left != given).any(dim=-1, keepdim=True)
        replaced = torch.empty_like(weights).scatter_(-1, order, (left / self._scale).to(weights.dtype))
        return torch.where(changed, replaced, weights)

    def _scaled_outputs(
        self, shared_output: torch.Tensor | None, fused_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        shared, routed = self._scale_outputs(shared_output, fused_output)
        if torch.compiler.is_compiling():
            return shared, routed
        if self.routed.is_watched:
            routed = self.routed(routed)
        if shared is not None and self.shared.is_watched:
            shared = self.shared(shared)
        return shared, routed


def _has_choice(runner: Runner) -> bool:
    """Return whether the router gives each token's experts, as ids of the model's experts.

    Kernels that choose experts themselves do not, nor do layers whose tokens are divided over ranks, or that
    keep copies of busy experts.
    """
    config = runner.moe_config
    is_divided = config.dp_size > 1 or config.pcp_size > 1 or config.is_sequence_parallel
    return not (runner.is_monolithic or is_divided or runner.router.eplb_state is not None)


def install_expert_points(model: nn.Module, config: Any) -> None:
    weights_of = expert_weights(config)
    for path, module in list(model.named_modules()):
        if isinstance(module, MoERunner):
            # Gemma 4's router is beside its experts.
            router = getattr(model.get_submodule(path.rpartition(".")[0]), "router", None)
            factors = partial(expert_factors, router)
            module.add_module(INNER, InnerExperts(cast("Runner", module), weights_of, factors))
