"""Taps: opaque operators on the residual stream, before the first decoder layer and after each.

To the compiler a tap only mutates its arguments, so it stays in the compiled step. Taps must be installed
after the weights are loaded and before anything is compiled. Operations are stored in vLLM's forward context,
so that several engines in one process do not interfere.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from nnsight_engine.plans.step.plan import StepPlan

if TYPE_CHECKING:
    from nnsight_engine.families.layout import EngineFamily
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

CONTEXT_KEY: Final = "nnsight_engine_step"
"""Key of the step's ``TapWork`` in ``ForwardContext.additional_kwargs``."""

_LIBRARY: Final = torch.library.Library("nnsight_engine", "FRAGMENT")


class TapWork(Protocol):
    def is_busy(self, tap: int) -> bool:
        """Return whether a tap may have work; checked at each tap of each step, and mostly false."""

    def reach_tap(self, tap: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None: ...


class TapStep:
    """The operations of a step at the taps; with ``returns_none``, layers return ``(stream, None)``."""

    __slots__ = ("_dispatcher", "_plan", "_planned", "_returns_none", "_served")

    def __init__(
        self, plan: StepPlan | None, dispatcher: TraceDispatcher | None, *, returns_none: bool = False
    ) -> None:
        """Take a step's operations and blocks, if any; ``returns_none``: layers return a pair with None."""
        self._returns_none = returns_none
        self._plan = plan
        self._planned = frozenset[int]() if plan is None else plan.taps()
        self._dispatcher = dispatcher
        # Blocks are served at taps if their route is known; else by hooks.
        self._served = dispatcher if dispatcher is not None and dispatcher.route is not None else None

    def is_busy(self, tap: int) -> bool:
        return tap in self._planned or (self._served is not None and tap >= self._served.next_tap)

    def is_models_own(self) -> bool:
        """Return whether the current call is made by the model; blocks may call modules themselves."""
        return self._dispatcher is None or self._dispatcher.listener == get_ident()

    def reach_tap(self, tap: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Handle the arrival at a tap: the plan changes the tensors in place, then the blocks do."""
        if not self.is_models_own():
            return
        self.run_plan(tap, hidden, residual)
        dispatcher = self._served
        if dispatcher is not None:
            is_single = residual is None and not (tap and self._returns_none)
            dispatcher.at_tap(tap, hidden if is_single else (hidden, residual))

    def run_plan(self, tap: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Run the plan's operations at a tap, or at the location of a tap that is not installed."""
        plan = self._plan
        if plan is not None and tap in plan.groups:
            plan.run(tap, rows_of(hidden), None if residual is None else rows_of(residual))


def _tap_pair(hidden: torch.Tensor, residual: torch.Tensor, tap: int) -> None:
    step: TapWork | None = get_forward_context().additional_kwargs.get(CONTEXT_KEY)
    if step is not None and step.is_busy(tap):
        step.reach_tap(tap, hidden, residual)


def _tap_single(hidden: torch.Tensor, tap: int) -> None:
    step: TapWork | None = get_forward_context().additional_kwargs.get(CONTEXT_KEY)
    if step is not None and step.is_busy(tap):
        step.reach_tap(tap, hidden, None)


def rows_of(value: torch.Tensor) -> torch.Tensor:
    """Return the value as ``[tokens, width]``: some backends have a leading batch axis of size 1."""
    return value if value.ndim == len(("tokens", "width")) else value.flatten(0, -2)


def _tap_pair_fake(hidden: torch.Tensor, residual: torch.Tensor, tap: int) -> None: ...


def _tap_single_fake(hidden: torch.Tensor, tap: int) -> None: ...


direct_register_custom_op(
    "tap_pair",
    _tap_pair,
    mutates_args=["hidden", "residual"],
    fake_impl=_tap_pair_fake,
    target_lib=_LIBRARY,
)
direct_register_custom_op(
    "tap_single",
    _tap_single,
    mutates_args=["hidden"],
    fake_impl=_tap_single_fake,
    target_lib=_LIBRARY,
)


def install_taps(layers: Sequence[nn.Module], family: EngineFamily, taps: Collection[int]) -> None:
    """Install taps: 0 before the first of the decoder layers, i + 1 after layer i."""
    for index, layer in enumerate(layers):
        if index + 1 in taps:
            layer.forward = _tapped(layer.forward, index)
    if 0 in taps:
        first = layers[0]
        first.forward = _tapped_at_start(first.forward, family)


def drop_unused_residuals(layers: Sequence[nn.Module]) -> None:
    """Have layers return zeros in place of their second tensor, which nothing reads."""
    for layer in layers:
        layer.forward = _without_residual(layer.forward)


@contextlib.contextmanager
def untapped(
    layers: Sequence[nn.Module], family: EngineFamily, taps: Collection[int], step: TapStep
) -> Iterator[None]:
    """Run the plan at residual points without taps, by hooks, during one uncompiled forward pass."""

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if step.is_models_own():
            step.run_plan(0, family.hidden_of(args, kwargs), None)

    def after(tap: int, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if step.is_models_own():
            pair = output if isinstance(output, tuple) else (output, None)
            step.run_plan(tap, pair[0], pair[1])

    with contextlib.ExitStack() as stack:
        for tap in taps:
            if tap:
                handle = layers[tap - 1].register_forward_hook(functools.partial(after, tap))
            else:
                handle = layers[0].register_forward_pre_hook(before, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _without_residual(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's ``forward`` with zeros as the second tensor, which is unused."""

    def forward_alone(*args: Any, **kwargs: Any) -> Any:
        hidden, _ = forward(*args, **kwargs)
        return hidden, torch.zeros_like(hidden)

    return forward_alone


def _tapped(forward: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return a layer's ``forward`` that passes its output through the tap behind it."""
    tap = index + 1

    def tapped_forward(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not isinstance(output, tuple):
            torch.ops.nnsight_engine.tap_single(output, tap)
        elif output[1] is None:
            torch.ops.nnsight_engine.tap_single(output[0], tap)
        else:
            torch.ops.nnsight_engine.tap_pair(output[0], output[1], tap)
        return output

    return tapped_forward


def _tapped_at_start(forward: Callable[..., Any], family: EngineFamily) -> Callable[..., Any]:
    """Return the first layer's ``forward`` that passes its input through tap 0."""

    def tapped_forward(*args: Any, **kwargs: Any) -> Any:
        torch.ops.nnsight_engine.tap_single(family.hidden_of(args, kwargs), 0)
        return forward(*args, **kwargs)

    return tapped_forward
