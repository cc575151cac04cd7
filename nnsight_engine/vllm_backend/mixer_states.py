"""Recurrent states of Mamba-2 mixers, in vLLM's KV cache, one block for each request.

Kernels update them in place: after a call it is the state after the step's last position; no other exists.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, cast

import torch
from torch import nn
from vllm.forward_context import get_forward_context


class Mixer(Protocol):
    prefix: str
    kv_cache: tuple[torch.Tensor, ...]
    num_heads: int
    head_dim: int
    ssm_state_size: int
    use_replayssm: bool


def mixer_state_shape(module: nn.Module) -> tuple[int, ...]:
    """Return heads, head_dim and state_size; empty with ``--use-replayssm``, which keeps an old state."""
    mixer = cast("Mixer", module)
    if mixer.use_replayssm:
        return ()
    return (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)


@dataclasses.dataclass(frozen=True, slots=True)
class MixerStates:
    """One mixer's states: a view ``[slots, heads * head_dim * state_size]``, and the slot of each request."""

    held: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def of(module: nn.Module) -> MixerStates:
        """Return the states of a mixer; to be called before the model's next step."""
        mixer = cast("Mixer", module)
        metadata: Any = get_forward_context().attn_metadata
        step = metadata[mixer.prefix]
        # The requests that decode come first. With drafts, each has further slots, for the state after each.
        parts = []
        if step.num_decodes:
            parts.append(step.state_indices_tensor_d[: step.num_decodes, 0])
        if step.num_prefills:
            parts.append(step.state_indices_tensor_p)
        held = mixer.kv_cache[1]
        return MixerStates(held.view(len(held), -1), torch.cat(parts))

    def of_request(self, index: int) -> torch.Tensor:
        """Return a copy of the state of one of the step's requests, flat."""
        return self.held.index_select(0, self.slots[index : index + 1])[0]
