"""Recurrent states for blocks, read where vLLM keeps them, right after the mixer's call."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from nnsight_engine.envoys.architectures.errors import StateError
from nnsight_engine.vllm_backend.mixer_states import MixerStates

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStatePoint:
    """The state of one mixer after the last position of a step, ``[heads, head_dim, state_size]``.

    ``output`` is the module that returns ``mixer.output``, so that both points can be read in either order.
    """

    name: str
    mixer: Envoy
    output: Envoy
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Wait until the mixer has run, and return a copy; StateError if it runs in another process."""
        module: Any = self.mixer._module  # noqa: SLF001 - an envoy of ours
        if not hasattr(module, "kv_cache"):
            raise StateError(
                f"{self.name} stays in the worker of the layer, and this block runs in another process, of "
                "a sandbox or another pipeline stage. Read it with a `capture` operation, or ask the "
                "operator for a key of the tier 'trusted' on an engine without stages"
            )
        _ = self.output.output
        mediator = self.output.interleaver.current
        assert mediator is not None  # noqa: S101 - it has just been answered
        request: Any = mediator.interleaver
        with torch.inference_mode(mode=False):  # blocks run outside of it, and may edit the copy
            state = MixerStates.of(module).of_request(request.index).view(self.shape)
        request.memory.give(state.nbytes)
        return state

    def write(self, value: torch.Tensor) -> NoReturn:
        """Raise StateError: states cannot be written."""
        del value
        raise StateError.unwritable(self.name)
