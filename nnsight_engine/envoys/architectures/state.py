"""Recurrent states of mixers, which a transformers model keeps in its cache instead of returning them.

A mixer is called with the cache and updates its layer's state there, in place. ``points`` has one
``RunningCache`` for each model, which watches the mixers' calls, and one ``StatePoint`` for each layer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from nnsight_engine.envoys.architectures.errors import StateError

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy


class RunningCache:
    """Records the cache with which the mixers of the running step were called; watches their inputs.

    Attributes:
        cache: The cache; None without one, and outside a run.
    """

    def __init__(self) -> None:
        self.cache: Any = None

    def add(self, provider: str, iteration: int | None, value: Any) -> None:
        """Record the cache among a mixer's arguments, ``(args, kwargs)``."""
        del provider, iteration
        _, kwargs = value
        self.cache = kwargs.get("cache_params")


@dataclasses.dataclass(frozen=True, slots=True)
class StatePoint:
    """The state of one mixer after the last token of a step, ``[batch, heads, head_dim, state_size]``.

    Attributes:
        name: The point's name.
        envoy: The mixer.
        running: The cache of the running step.
        shape: Shape of one row's state.
    """

    name: str
    envoy: Envoy
    running: RunningCache
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Wait until the mixer has returned, and return a copy of the state of this block's rows.

        Raises:
            StateError: The model runs without a cache.
        """
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
        """Raise: states cannot be written.

        Raises:
            StateError: Always.
        """
        del value
        raise StateError.unwritable(self.name)
