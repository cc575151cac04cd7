"""Hooks for points inside a block, and for the vision encoder, present only during one uncompiled step.

Hooks present while a graph is traced would become part of it; those added later never run in a compiled step.
Queries and keys are taken as vLLM's attention gets them, after rotary embedding and norms. Some models call
``Attention.forward`` directly, which skips hooks, so ``forward`` is replaced on the instance.

Values inside vLLM's layers of experts that no module takes or returns, as modules below the ``MoERunner``.

Invariant: rows whose value nobody changed keep vLLM's own numbers, bit by bit, and its own order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import LinearBase

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import PATTERN, STATE
from nnsight_engine.envoys.architectures.expert_points import (
    ExpertWeights,
    by_weight,
    expert_factors,
    expert_weights,
)
from nnsight_engine.plans.request_plan import PlannedSite
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.plans.step.read_kernels import AttentionForm
from nnsight_engine.vllm_backend.model_points import MixerStates, ModelPoints, base_module

_SHOWN_BY_LAYER: Final = ("has_sink", "use_alibi_sqrt")
_SHOWN_BY_KERNEL: Final = ("alibi_slopes", "logits_soft_cap", "scale")


class AttentionHook:
    """Serves a pattern's site until it is removed; calls that a block makes are left alone."""

    def __init__(
        self, module: nn.Module, plan: StepPlan, site: PlannedSite, is_models_own: Callable[[], bool]
    ) -> None:
        """Replace attention's ``forward``: the plan gets the queries and keys of the model's own calls."""
        attention: Any = module
        self._attention = attention
        self._replaced = vars(module).get("forward")
        forward = attention.forward

        def attend(
            query: torch.Tensor, key: torch.Tensor | None, value: Any, *args: Any, **kwargs: Any
        ) -> Any:
            """Run the plan on a call's queries and keys, then attention's own ``forward``."""
            if not is_models_own():
                return forward(query, key, value, *args, **kwargs)
            with plan.containing(site):
                queries = query.reshape(-1, attention.num_heads, attention.head_size)
                keys = None if key is None else key.reshape(-1, attention.num_kv_heads, attention.head_size)
                plan.run(site, queries, keys)
            return forward(query, key, value, *args, **kwargs)

        attention.forward = attend

    def remove(self) -> None:
        if self._replaced is None:
            del self._attention.forward
        else:
            self._attention.forward = self._replaced


def attention_form(attention: Any) -> AttentionForm:
    """Return how a layer's attention is computed.

    Raises:
        InterventionError: It does more than scale, cap and mask, or its parameters are unknown.
    """
    impl = attention.impl
    for owner, names in ((attention, _SHOWN_BY_LAYER), (impl, _SHOWN_BY_KERNEL)):
        if missing := [name for name in names if not hasattr(owner, name)]:
            raise _not_computable(f"{type(owner).__name__} does not expose {', '.join(missing)}")
    if attention.use_alibi_sqrt or attention.has_sink:
        raise _not_computable("the model's attention has sinks, or roots of distances as position biases")
    slopes: torch.Tensor | None = impl.alibi_slopes
    return AttentionForm(
        scale=float(impl.scale),
        soft_cap=float(impl.logits_soft_cap or 0.0),
        window=attention.sliding_window or 0,
        slopes=None if slopes is None else slopes.to(torch.float32),
    )


def _not_computable(reason: str) -> InterventionError:
    return InterventionError(
        "unsupported_at_point",
        f"attention patterns cannot be computed: {reason}; capture attn.q and attn.k instead",
    )


def keep_inputs_plain(points: ModelPoints) -> None:
    """Have the inputs of linear layers that are points computed in the model's dtype.

    Some quantised linear layers take inputs that vLLM quantised together with the activation function.
    """
    for layer in points.local_layers:
        for spec in points.layout.blocks[layer].leaves.values():
            module = base_module(points.layers[layer].get_submodule(spec.path))
            if spec.side == "input" and isinstance(module, LinearBase):
                module.requires_unquantized_input = True


@contextlib.contextmanager
def hooked(points: ModelPoints, plan: StepPlan, is_models_own: Callable[[], bool]) -> Iterator[None]:
    """Serve the plan's hook sites during one forward pass; calls that are not the model's own are ignored."""
    handles: list[RemovableHandle | AttentionHook] = []
    try:
        for site in plan.hook_sites():
            with plan.containing(site):
                handles.append(_register(points, plan, site, is_models_own))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def hooked_encoder(points: ModelPoints, plan: StepPlan, num_rows: int) -> Iterator[None]:
    """Serve the plan's sites in the vision encoder, which runs for one image of ``num_rows`` patches."""
    handles: list[RemovableHandle] = []
    try:
        for site in plan.hook_sites():
            serve = partial(_serve_image, plan, site, num_rows)
            handles.append(points.encoder[site.layer].register_forward_hook(serve))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _serve_image(
    plan: StepPlan, site: PlannedSite, num_rows: int, _block: nn.Module, _args: object, output: Any
) -> None:
    """Run the plan on a block's output for one image; a hook of the block."""
    with plan.containing(site):
        rows = output.reshape(-1, output.shape[-1])
        if len(rows) != num_rows:
            raise InterventionError(
                "intervention_failed",
                f"{site} has {len(rows)} rows for an image with {num_rows}, so they cannot be told apart; "
                "this is a defect of the server, please report it with the model's name",
            )
        plan.run(site, rows, None)
        if plan.writes_at(site) and rows.data_ptr() != output.data_ptr():
            output.copy_(rows.view_as(output))


def _register(
    points: ModelPoints, plan: StepPlan, site: PlannedSite, is_models_own: Callable[[], bool]
) -> RemovableHandle | AttentionHook:
    """Have the plan run where a site's value arises: at attention's call, a mixer's states, or a module."""
    if site.leaf == PATTERN:
        return AttentionHook(points.attention(site.layer), plan, site, is_models_own)
    if site.leaf == STATE:
        mixer, _ = points.locate(site.leaf, site.layer)
        return mixer.register_forward_hook(_reading_states(plan, site, is_models_own))
    return _register_value(points, plan, site, is_models_own)


def _register_value(
    points: ModelPoints, plan: StepPlan, site: PlannedSite, is_models_own: Callable[[], bool]
) -> RemovableHandle:
    """Hook the module whose input or output has a site's value, so that the plan runs on it there."""
    module, spec = points.locate(site.leaf, site.layer)
    writes = plan.writes_at(site)

    def serve(hooked_value: object) -> torch.Tensor:
        """Run the plan on the value from a hook's arguments; return the value, changed if the plan writes."""
        value = points.value(spec, hooked_value)
        # An input may be memory that the block still needs, so writes go to a copy.
        if writes and spec.side == "input":
            value = value.clone()
        view = points.view(spec, value, site.layer)
        flat = view.reshape(view.shape[0], -1)
        plan.run(site, flat, None)
        if writes and flat.data_ptr() != view.data_ptr():
            view.copy_(flat.view_as(view))
        return value

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        changed = None
        if not is_models_own():
            return None
        with plan.containing(site):
            value = serve(args)
            changed = (value, *args[1:]) if writes else None
        return changed  # noqa: RET504 - None if ``containing`` caught an error

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if is_models_own():
            with plan.containing(site):
                serve(output)

    if spec.side == "input":
        return module.register_forward_pre_hook(before)
    return module.register_forward_hook(after)


def _reading_states(
    plan: StepPlan, site: PlannedSite, is_models_own: Callable[[], bool]
) -> Callable[[nn.Module, object, object], None]:
    """Return a hook that reads a mixer's states as its call has left them, which the next step overwrites."""

    def after(module: nn.Module, _args: object, _output: object) -> None:
        if is_models_own():
            with plan.containing(site):
                states = MixerStates.of(module)
                plan.run(site, states.held, states.slots)

    return after


INNER: Final = "inner"
"""Name of the added module below a runner."""


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
        weights_of: Computes the weights of given experts; None if the model's rule for them is unknown.
        ids: The ids of the chosen experts, int64 ``[tokens, top_k]``, by weight, the largest first.
        weights: Their weights, ``[tokens, top_k]``, with the model's constant factor.
        routed: What the routed experts add, ``[tokens, hidden]``; under tensor parallelism a rank's part.
        shared: What the shared experts add, likewise.
    """

    def __init__(
        self,
        runner: Any,
        weights_of: ExpertWeights | None,
        factors: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> None:
        """Put the values in place of the runner's own; ``factors`` returns its router's factors, if any."""
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
        """In place of the router's method: offer the choice as ``ids`` and ``weights``, if watched."""
        weights, ids = self._select(hidden_states, router_logits, *args, **kwargs)
        if torch.compiler.is_compiling() or not (self.ids.is_watched or self.weights.is_watched):
            return weights, ids
        weights, ids = self._with_ids(router_logits[..., : self.num_experts], weights, ids)
        return self._with_weights(weights), ids

    def _with_ids(
        self, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Offer the experts' ids, by weight, and return weights and ids with the changes."""
        reordered = ids.gather(-1, by_weight(weights)).long()
        chosen = self.ids(reordered.clone())
        if self.weights_of is None:
            return weights, ids
        changed = (chosen != reordered).any(dim=-1, keepdim=True)
        # Whoever writes ids checks them. Kernels use them as indices, so that a mistake would be fatal.
        chosen = chosen.clamp(0, self.num_experts - 1)
        forced = self.weights_of.weights_of(logits, chosen, self._factors()) / self._scale
        weights = torch.where(changed, forced.to(weights.dtype), weights)
        return weights, torch.where(changed, chosen.to(ids.dtype), ids)

    def _with_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Offer the weights, by size and scaled, to operations and blocks; return them with the changes."""
        order = by_weight(weights)
        reordered = weights.gather(-1, order) * self._scale
        returned = self.weights(reordered.clone())
        changed = (returned != reordered).any(dim=-1, keepdim=True)
        replaced = torch.empty_like(weights).scatter_(-1, order, (returned / self._scale).to(weights.dtype))
        return torch.where(changed, replaced, weights)

    def _scaled_outputs(
        self, shared_output: torch.Tensor | None, fused_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """In place of the runner's method: offer its results as ``routed`` and ``shared``, if watched."""
        shared, routed = self._scale_outputs(shared_output, fused_output)
        if torch.compiler.is_compiling():
            return shared, routed
        if self.routed.is_watched:
            routed = self.routed(routed)
        if shared is not None and self.shared.is_watched:
            shared = self.shared(shared)
        return shared, routed


def _has_choice(runner: Any) -> bool:
    """Return whether the router gives each token's experts, as ids of the model's experts.

    Kernels that choose experts themselves do not, nor do layers whose tokens are divided over ranks, or that
    keep copies of busy experts.
    """
    config = runner.moe_config
    is_divided = config.dp_size > 1 or config.pcp_size > 1 or config.is_sequence_parallel
    return not (runner.is_monolithic or is_divided or runner.router.eplb_state is not None)


def install_expert_points(model: nn.Module, config: Any) -> None:
    """Put ``InnerExperts`` below each layer of experts of a loaded model."""
    weights_of = expert_weights(config)
    for path, module in list(model.named_modules()):
        if isinstance(module, MoERunner):
            # Gemma 4's router is beside its experts.
            router = getattr(model.get_submodule(path.rpartition(".")[0]), "router", None)
            factors = partial(expert_factors, router)
            module.add_module(INNER, InnerExperts(module, weights_of, factors))
