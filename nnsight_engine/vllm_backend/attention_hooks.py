"""Hooks on queries and keys as vLLM's attention gets them, after rotary embedding and norms, for one step.

Some models call ``Attention.forward`` directly, which skips hooks, so ``forward`` is replaced on the
instance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import torch
from torch import nn

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.sites import PlannedSite
from nnsight_engine.plans.step.patterns import AttentionForm
from nnsight_engine.plans.step.plan import StepPlan

_SHOWN_BY_LAYER: Final = ("has_sink", "use_alibi_sqrt")
_SHOWN_BY_KERNEL: Final = ("alibi_slopes", "logits_soft_cap", "scale")


class AttentionModule(Protocol):
    forward: Any
    has_sink: bool
    impl: Any
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    use_alibi_sqrt: bool


class AttentionHook:
    """Serves a pattern's site until it is removed; calls that a block makes are left alone."""

    def __init__(
        self, module: nn.Module, plan: StepPlan, site: PlannedSite, is_models_own: Callable[[], bool]
    ) -> None:
        attention = cast("AttentionModule", module)
        self._attention = attention
        self._replaced = vars(module).get("forward")
        forward = attention.forward

        def attend(
            query: torch.Tensor, key: torch.Tensor | None, value: Any, *args: Any, **kwargs: Any
        ) -> Any:
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


def attention_form(module: object) -> AttentionForm:
    """Return how a layer's attention is computed.

    Raises:
        InterventionError: It does more than scale, cap and mask, or its parameters are unknown.
    """
    attention = cast("AttentionModule", module)
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
