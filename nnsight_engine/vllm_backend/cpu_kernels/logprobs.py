from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

from nnsight_engine.vllm_backend.cpu_kernels.ragged import lengths_of, rows_and_places

_BYTE_BITS: Final = 8


def topk_log_softmax(*, output: torch.Tensor, logits: torch.Tensor, topk_ids: torch.Tensor) -> None:
    logits = logits.float()
    largest = logits.amax(-1, keepdim=True)
    log_sums = (logits - largest).exp_().sum(-1, keepdim=True).log_()
    torch.sub(logits.gather(1, topk_ids) - largest, log_sums, out=output)


def ranks(*, output: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Count the tokens that are at least as likely as the given one, itself included."""
    torch.sum(logits >= logits.gather(1, token_ids.long()[:, None]), -1, out=output)


def fill_logprob_token_ids(
    *,
    out_token_ids: torch.Tensor,
    out_valid_mask: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    topk_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    num_per_req_token_ids: torch.Tensor,
    per_req_token_ids: torch.Tensor,
    num_topk: int,
) -> None:
    """Write the tokens to report for each row: the sampled one, then the request's own or else the best."""
    out_token_ids[:, 0], out_valid_mask[:, 0] = sampled_token_ids, True
    counts = num_per_req_token_ids[expanded_idx_mapping]
    rows, places = rows_and_places(counts)
    out_token_ids[rows, places + 1] = per_req_token_ids[expanded_idx_mapping[rows], places].long()
    out_valid_mask[rows, places + 1] = True
    if num_topk:
        others = (counts == 0).nonzero().view(-1)
        out_token_ids[others, 1 : num_topk + 1] = topk_indices[others, :num_topk].long()
        out_valid_mask[others, 1 : num_topk + 1] = True


def prompt_logprobs_token_ids(
    *,
    prompt_logprobs_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
) -> None:
    rows, places = rows_and_places(lengths_of(query_start_loc, len(idx_mapping)))
    requests = idx_mapping[rows]
    positions = (num_computed_tokens[requests] + 1 + places).clamp(max=all_token_ids.shape[1] - 1)
    prompt_logprobs_token_ids[: len(rows)] = all_token_ids[requests, positions]


def num_nans(*, logits: torch.Tensor, num_nans: torch.Tensor) -> None:
    num_nans.copy_(logits.isnan().sum(-1))


def compact_sampling_mask(
    *,
    logits: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_sampled_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    packed_mask: torch.Tensor,
    counts: torch.Tensor,
    max_num_kept: int,
    rows_per_request: int,
) -> None:
    """Write which tokens of each sampled row are finite: the first ones, their number, and a bit for each."""
    slots, requests = (
        torch.arange(len(counts)) % rows_per_request,
        torch.arange(len(counts)) // rows_per_request,
    )
    is_sampled = slots < num_sampled_tokens[requests]
    source = (cu_num_logits[requests] + slots).clamp(max=len(logits) - 1)
    is_kept = logits[source].isfinite() & is_sampled[:, None]
    counts.copy_(is_kept.sum(-1))
    rows, tokens = is_kept.nonzero(as_tuple=True)
    places = (is_kept.cumsum(-1) - 1)[rows, tokens]
    fits = places < max_num_kept
    token_ids[rows[fits], places[fits]] = tokens[fits].to(token_ids.dtype)
    padded = pad(is_kept, (0, _BYTE_BITS * packed_mask.shape[1] - is_kept.shape[1]))
    by_byte = padded.unflatten(1, (-1, _BYTE_BITS)).int()
    packed_mask.copy_((by_byte << torch.arange(_BYTE_BITS, dtype=torch.int32)).sum(-1))
