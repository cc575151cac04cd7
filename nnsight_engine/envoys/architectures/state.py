"""Recurrent states of mixers, which a transformers model updates in place in its cache, not returned."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from nnsight_engine.envoys.architectures.errors import StateError

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy


class RunningCache:
    """Records the cache with which the mixers of the running step were called; None without one."""

    def __init__(self) -> None:
        self.cache: Any = None

    def add(self, provider: str, iteration: int | None, value: Any) -> None:
        del provider, iteration
        _, kwargs = value
        self.cache = kwargs.get("cache_params")


@dataclasses.dataclass(frozen=True, slots=True)
class StatePoint:
    """The state of one mixer after the last token of a step, ``[batch, heads, head_dim, state_size]``."""

    name: str
    envoy: Envoy
    running: RunningCache
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Return a copy of this block's rows once the mixer has returned; StateError without a cache."""
        _ = self.envoy.output
        cache = self.running.cache
        if cache is None:
            raise StateError(
                f"{self.name} is kept in the model's cache only, and this run has none; drop use_cache=False"
            )
        module: Any = self.envoy._module
        state: torch.Tensor = cache.layers[module.layer_idx].recurrent_states[0]
        mediator = self.envoy.interleaver.current
        group = None if mediator is None else mediator.batch_group
        batcher = self.envoy.interleaver.batcher
        if group is not None and not batcher.covers_batch(group):
            state = state.narrow(0, *group)
        return state.clone()

    def write(self, value: torch.Tensor) -> NoReturn:
        del value
        raise StateError.unwritable(self.name)
