"""Hooks for points inside a block, and for the vision encoder, present only during one uncompiled step.

Hooks present while a graph is traced would become part of it; those added later never run in a compiled step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from vllm.model_executor.layers.linear import LinearBase

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.leaves import PATTERN, STATE
from nnsight_engine.plans.sites import PlannedSite
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.vllm_backend.attention_hooks import AttentionHook
from nnsight_engine.vllm_backend.mixer_states import MixerStates
from nnsight_engine.vllm_backend.model_points import ModelPoints, base_module


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
    if site.leaf == PATTERN:
        return AttentionHook(points.attention(site.layer), plan, site, is_models_own)
    if site.leaf == STATE:
        mixer, _ = points.locate(site.leaf, site.layer)
        return mixer.register_forward_hook(_reading_states(plan, site, is_models_own))
    return _register_value(points, plan, site, is_models_own)


def _register_value(
    points: ModelPoints, plan: StepPlan, site: PlannedSite, is_models_own: Callable[[], bool]
) -> RemovableHandle:
    module, spec = points.locate(site.leaf, site.layer)
    writes = plan.writes_at(site)

    def serve(hooked_value: object) -> torch.Tensor:
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
