"""Kernels of what some requests keep: rotary positions in several dimensions, prompt embeddings, states."""

from __future__ import annotations

from typing import Final

import torch

from nnsight_engine.vllm_backend.cpu_kernels.launches import Functions
from nnsight_engine.vllm_backend.cpu_kernels.ragged import lengths_of, rows_and_places, tensor_at


def prepare_rope_positions(
    *,
    positions: torch.Tensor,
    prefill_positions: torch.Tensor,
    prefill_delta: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_dims: int,
) -> None:
    """Write each token's position in each dimension: given for the prompt, then counted on from it."""
    rows, places = rows_and_places(lengths_of(query_start_loc, len(idx_mapping)))
    requests = idx_mapping[rows]
    num_computed = num_computed_tokens[requests]
    counted = num_computed + places
    is_prompt = num_computed < prefill_lens[requests]
    within = counted.clamp(max=prefill_positions.shape[1] - 1)
    for dim in range(num_dims):
        given = prefill_positions[num_dims * requests + dim, within]
        positions[dim, : len(rows)] = torch.where(is_prompt, given, counted + prefill_delta[requests])


def apply_prompt_embeds(
    *,
    inputs_embeds: torch.Tensor,
    embeds_ptrs: torch.Tensor,
    mask_ptrs: torch.Tensor,
    embeds_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    hidden_size: int,
) -> None:
    """Write the embeddings that a request gives for its prompt, but where its mask says it gives a token."""
    addresses, masks = embeds_ptrs.tolist(), mask_ptrs.tolist()
    lengths = lengths_of(query_start_loc, len(idx_mapping)).tolist()
    starts = query_start_loc.tolist()
    for row, request in enumerate(idx_mapping.tolist()):
        begin, num_given = int(num_computed_tokens[request]), int(embeds_lens[request])
        count = min(lengths[row], num_given - begin)
        if count <= 0:
            continue
        own = slice(begin, begin + count)
        given = tensor_at(addresses[request], num_given * hidden_size, inputs_embeds.dtype)
        target = inputs_embeds[starts[row] : starts[row] + count]
        is_token = torch.zeros(count, dtype=torch.bool)
        if masks[request]:
            is_token = tensor_at(masks[request], num_given, torch.bool)[own]
        target[~is_token] = given.view(num_given, hidden_size)[own][~is_token]


def scatter_num_accepted(
    *, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_accepted: torch.Tensor
) -> None:
    """Store how many tokens each request accepted, at least one; negative indices are left out."""
    is_real = idx_mapping >= 0
    accepted = num_sampled[: len(idx_mapping)][is_real].clamp(min=1)
    num_accepted[idx_mapping[is_real]] = accepted.to(num_accepted.dtype)


def fill_num_accepted(*, idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_sampled: int) -> None:
    """Store one number for all requests; negative indices are left out."""
    num_accepted[idx_mapping[idx_mapping >= 0]] = num_sampled


FUNCTIONS: Final[Functions] = {
    "gpu.mm.rope:_prepare_rope_positions_kernel": prepare_rope_positions,
    "gpu.model_states.prompt_embeds:_apply_prompt_embeds_kernel": apply_prompt_embeds,
    "gpu.model_states.mamba_hybrid:_scatter_num_accepted_kernel": scatter_num_accepted,
    "gpu.model_states.mamba_hybrid:_fill_num_accepted_kernel": fill_num_accepted,
}
