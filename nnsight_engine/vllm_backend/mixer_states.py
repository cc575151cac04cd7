"""Recurrent states of Mamba-2 mixers, which vLLM keeps in blocks of its KV cache, one for each request.

A mixer's kernels update the state in place: after its call in a step, a request's block has the state after
the last position that the step computes for it. No state in between exists in memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, cast

import torch
from torch import nn
from vllm.forward_context import get_forward_context


class Mixer(Protocol):
    """The attributes of vLLM's ``MambaMixer2`` that are used here."""

    prefix: str
    kv_cache: tuple[torch.Tensor, ...]
    num_heads: int
    head_dim: int
    ssm_state_size: int
    use_replayssm: bool


def mixer_state_shape(module: nn.Module) -> tuple[int, ...]:
    """Return heads, head_dim and state_size of a mixer's state; empty if its kernel does not keep it.

    With ``--use-replayssm`` the state is that of some steps ago, beside the inputs of the steps since.
    """
    mixer = cast("Mixer", module)
    if mixer.use_replayssm:
        return ()
    return (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)


@dataclasses.dataclass(frozen=True, slots=True)
class MixerStates:
    """The states of one mixer, right after its call in a step.

    Attributes:
        held: Those of all requests that vLLM holds, ``[slots, heads * head_dim * state_size]``, as a view.
        slots: The slot of each of the step's requests, in their order.
    """

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
