"""Kernels that judge drafts: accept the first ones, and sample the token after them.

See Leviathan et al., 2023, https://arxiv.org/abs/2211.17192. Where the temperature is zero, only the target's
best token is accepted. Without its logits, a draft has probability one. Logits of the target are divided by
temperature already, those of drafts are not.
"""

from __future__ import annotations

import torch

from nnsight_engine.vllm_backend.cpu_kernels.gumbel import noised_argmax, uniform
from nnsight_engine.vllm_backend.cpu_kernels.ragged import lengths_of, rows_and_places


def flatten_sampled(
    *,
    flat_sampled: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
) -> None:
    rows, places = rows_and_places(num_sampled)
    flat_sampled[cu_num_logits[rows] + places] = sampled[rows, places]


def gather_draft_sampled(
    *,
    draft_sampled: torch.Tensor,
    pos: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    prefill_len: torch.Tensor,
) -> None:
    """Write the token and position of each logits row; -1 for drafts of a request within its prompt."""
    pos.copy_(positions[logits_indices])
    is_prompt = pos - expanded_local_pos < prefill_len[expanded_idx_mapping]
    draft_sampled.copy_(input_ids[logits_indices].masked_fill(is_prompt & (expanded_local_pos > 0), -1))


def reject(
    *,
    sampled: torch.Tensor,
    rejected_steps: torch.Tensor,
    target_rejected_logsumexp: torch.Tensor,
    draft_rejected_logsumexp: torch.Tensor,
    target_logits: torch.Tensor,
    draft_sampled: torch.Tensor,
    draft_logits: torch.Tensor | None,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temp: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    synthetic_conditional_rates: torch.Tensor | None,
) -> None:
    """Write how many drafts each request accepts, the accepted tokens, and where all is greedy the next one.

    ``rejected_steps`` gets the place of the first refused draft; the sums of exponentials there go to
    ``resample``.
    """
    num_reqs, num_steps = len(idx_mapping), sampled.shape[1] - 1
    if draft_logits is not None:
        target_logits = target_logits[:, : draft_logits.shape[-1]]
    starts = cu_num_logits[:num_reqs].long()
    num_drafts = lengths_of(cu_num_logits, num_reqs) - 1
    temperatures = temp[idx_mapping]
    is_greedy = (temperatures == 0)[:, None]
    steps = torch.arange(num_steps)
    at = (starts[:, None] + steps).clamp(max=len(target_logits) - 1)
    tokens = draft_sampled[(at + 1).clamp(max=len(draft_sampled) - 1)].long()
    is_draft = (steps < num_drafts[:, None]) & (tokens >= 0)
    tokens = tokens.clamp(min=0)
    best = target_logits.argmax(-1)[at]
    is_accepted = tokens == best
    if not is_greedy.all() or synthetic_conditional_rates is not None:
        drawn = uniform(seed[idx_mapping][:, None].expand_as(at), pos[at])
    if not is_greedy.all():
        target_sums = target_logits.float().logsumexp(-1)
        ratios = target_logits[at, tokens].float() - target_sums[at]
        draft_sums = torch.zeros(at.shape)
        if draft_logits is not None:
            proposed = (
                draft_logits[idx_mapping].float()
                / torch.where(is_greedy, 1, temperatures[:, None])[:, :, None]
            )
            draft_sums = proposed.logsumexp(-1)
            ratios = ratios - (proposed.gather(2, tokens[:, :, None])[:, :, 0] - draft_sums)
        is_accepted = torch.where(is_greedy, is_accepted, ratios > drawn.log())
    if synthetic_conditional_rates is not None:
        is_accepted = drawn < synthetic_conditional_rates
    is_accepted = is_accepted & is_draft
    num_accepted = is_accepted.long().cumprod(1).sum(1)
    sampled[:, :num_steps] = torch.where(is_greedy & ~is_accepted, best, tokens)
    rejected_steps.copy_(num_accepted)
    if not is_greedy.all():
        target_rejected_logsumexp.copy_(target_sums[starts + num_accepted])
        refused = num_accepted.clamp(max=num_steps - 1)[:, None]
        draft_rejected_logsumexp.copy_(draft_sums.gather(1, refused)[:, 0])


def resample(
    *,
    resampled_local_argmax: torch.Tensor,
    target_logits: torch.Tensor,
    target_rejected_logsumexp: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_rejected_logsumexp: torch.Tensor,
    rejected_step: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    draft_sampled: torch.Tensor,
    temp: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    vocab_size: int,
) -> None:
    """Sample the next token; after a refusal, from what the target has more than the draft."""
    num_reqs = len(rejected_step)
    at = cu_num_logits[:num_reqs].long() + rejected_step
    requests = expanded_idx_mapping[at]
    temperatures = temp[requests]
    is_bonus = at == cu_num_logits[1 : num_reqs + 1] - 1
    refused = draft_sampled[(at + 1).clamp(max=len(draft_sampled) - 1)].long()
    rows = (~is_bonus & (refused >= 0) & (temperatures != 0)).nonzero().view(-1)
    left = target_logits[at, :vocab_size].float()
    if draft_logits is None:
        left[rows, refused[rows]] = -torch.inf
    elif len(rows):
        target = left[rows] - target_rejected_logsumexp[rows, None]
        proposed = draft_logits[requests[rows], rejected_step[rows], :vocab_size].float()
        draft = proposed / temperatures[rows, None] - draft_rejected_logsumexp[rows, None]
        ratio = (draft - target).exp()
        left[rows] = torch.where(ratio < 1, target + (-ratio).log1p(), -torch.inf)
    resampled_local_argmax[:, 0] = noised_argmax(left, temperatures, seed[requests], pos[at])


def insert_resampled(
    *,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    resampled_local_argmax: torch.Tensor,
    cu_num_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temp: torch.Tensor,
) -> None:
    """Write and count the token after the accepted drafts, which refused greedy requests have already."""
    num_reqs = len(num_sampled)
    at = cu_num_logits[:num_reqs].long() + num_sampled
    is_bonus = at == cu_num_logits[1 : num_reqs + 1] - 1
    own = ((temp[expanded_idx_mapping[at]] != 0) | is_bonus).nonzero().view(-1)
    sampled[own, num_sampled[own].long()] = resampled_local_argmax[own, 0]
    num_sampled += 1
