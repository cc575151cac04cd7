"""Kernels that change logits, and kernels of log-probabilities.

A row is judged with the drafts before it, ``expanded_local_pos`` of them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

from nnsight_engine.vllm_backend.cpu_kernels.ragged import (
    WORD_BITS,
    count_in,
    lengths_of,
    pack_bits,
    rows_and_places,
    unpack_bits,
)

_FORCED: Final = 1e9
"""The logit of a token that nothing else may be sampled than."""


def apply_min_p(*, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor) -> None:
    """Exclude tokens that are less likely than a share of the most likely one; zero excludes none."""
    limits = logits.amax(-1).float() + min_p[expanded_idx_mapping].float().log()
    logits.masked_fill_(logits < limits[:, None], -torch.inf)


def apply_penalties(
    *,
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    vocab_size: int,
) -> None:
    """Apply the penalties for tokens of the text so far, in which drafts before a row count as generated."""
    repetition, frequency, presence = (
        penalty[expanded_idx_mapping] for penalty in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    penalized = ((repetition != 1) | (frequency != 0) | (presence != 0)).nonzero().view(-1)
    requests, places = expanded_idx_mapping[penalized], expanded_local_pos[penalized]
    counts = output_bin_counts[requests]
    rows, before = rows_and_places(places)
    count_in(counts, rows, token_ids[(penalized - places)[rows] + before + 1].long())
    is_seen = counts > 0
    changed = logits[penalized].float()
    repetition = repetition[penalized][:, None]
    if (repetition != 1).any():
        is_repeated = is_seen | unpack_bits(prompt_bin_mask[requests], vocab_size)
        scale = torch.where(is_repeated, repetition, 1.0)
        changed *= torch.where(changed > 0, 1 / scale, scale)
    changed -= frequency[penalized][:, None] * counts
    changed -= presence[penalized][:, None] * is_seen
    logits[penalized] = changed.to(logits.dtype)


def bincount(
    *,
    expanded_idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
) -> None:
    """Count the generated tokens of new requests, and mark the tokens of their prompts."""
    requests = expanded_idx_mapping
    rows, places = rows_and_places(prefill_len[requests])
    tokens = all_token_ids[requests[rows], places].long()
    is_prompt = places < prompt_len[requests][rows]
    is_seen = torch.zeros(len(requests), WORD_BITS * prompt_bin_mask.shape[1], dtype=torch.bool)
    is_seen[rows[is_prompt], tokens[is_prompt]] = True
    prompt_bin_mask[requests] |= pack_bits(is_seen)
    count_in(output_bin_counts, requests[rows[~is_prompt]], tokens[~is_prompt])


def apply_bad_words(
    *,
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    bad_word_token_ids: torch.Tensor,
    bad_word_offsets: torch.Tensor,
    num_bad_words: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
) -> None:
    """Exclude the last token of each bad word whose other tokens end the text, drafts included."""
    rows, words = rows_and_places(num_bad_words[expanded_idx_mapping])
    if len(rows) == 0:
        return
    requests, drafts = expanded_idx_mapping[rows], expanded_local_pos[rows].long()
    start, end = bad_word_offsets[requests, words].long(), bad_word_offsets[requests, words + 1].long()
    num_output = (total_len[requests] - prompt_len[requests]).long()
    length, num_before = num_output + drafts, end - start - 1
    is_match = num_before <= length
    for index in range(int(num_before.max())):
        position = length - num_before + index
        committed = (prompt_len[requests] + position).clamp(0, all_token_ids.shape[1] - 1)
        drafted = (rows - drafts + position - num_output + 1).clamp(0, len(input_ids) - 1)
        actual = torch.where(position < num_output, all_token_ids[requests, committed], input_ids[drafted])
        expected = bad_word_token_ids[requests, (start + index).clamp(max=bad_word_token_ids.shape[1] - 1)]
        is_match &= (actual == expected) | (index >= num_before)
    last = bad_word_token_ids[requests, end - 1].long()
    logits[rows[is_match], last[is_match]] = -torch.inf


def replay_trace(
    *,
    sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    trace_token_ids: torch.Tensor,
    trace_len: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
) -> None:
    """Replace samples by the tokens of the answer that a request gives, as long as it lasts."""
    step = total_len[idx_mapping] - prompt_len[idx_mapping]
    is_replayed = (idx_mapping >= 0) & (step >= 0) & (step < trace_len[idx_mapping])
    sampled[is_replayed] = trace_token_ids[idx_mapping[is_replayed], step[is_replayed]].to(sampled.dtype)


def end_thinking(
    *,
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    thinking_token_budget: torch.Tensor,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    reasoning_start_token_ids: torch.Tensor,
    natural_reasoning_end_token_ids: torch.Tensor,
    reasoning_end_token_ids: torch.Tensor,
) -> None:
    """Force the end marker, token by token, where open reasoning is as long as its budget allows."""
    budgets = thinking_token_budget[expanded_idx_mapping]
    for row in (budgets >= 0).nonzero().view(-1).tolist():
        request, first_row = expanded_idx_mapping[row], row - int(expanded_local_pos[row])
        text = torch.cat([all_token_ids[request, : total_len[request]], input_ids[first_row + 1 : row + 1]])
        start = _last_place(text, reasoning_start_token_ids)
        num_tokens = len(text) - start - len(reasoning_start_token_ids)
        if start <= _last_place(text, natural_reasoning_end_token_ids) or num_tokens < budgets[row]:
            continue
        marker = reasoning_end_token_ids
        sizes = range(min(len(marker) - 1, len(text)), 0, -1)
        num_written = next((size for size in sizes if torch.equal(text[-size:], marker[:size])), 0)
        logits[row, marker[num_written]] = _FORCED


def _last_place(text: torch.Tensor, marker: torch.Tensor) -> int:
    """Return where a text has a marker last; -1 if nowhere."""
    if len(text) < len(marker):
        return -1
    places = (text.unfold(0, len(marker), 1) == marker).all(-1).nonzero()
    return int(places[-1]) if len(places) else -1


def apply_logit_bias(
    *,
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    num_allowed_token_ids: torch.Tensor,
    allowed_token_ids: torch.Tensor,
    num_logit_bias: torch.Tensor,
    bias_token_ids: torch.Tensor,
    bias: torch.Tensor,
    pos: torch.Tensor,
    min_lens: torch.Tensor,
    num_stop_token_ids: torch.Tensor,
    restore_when_all_masked: torch.Tensor,
    stop_token_ids: torch.Tensor,
    check_all_masked_rows: bool,
) -> None:
    """Apply allowed tokens, then biases, then the ban on stop tokens, unless nothing else is left."""
    requests = expanded_idx_mapping
    num_allowed = num_allowed_token_ids[requests]
    rows, places = rows_and_places(num_allowed)
    if len(rows):
        is_excluded = (num_allowed > 0)[:, None].repeat(1, logits.shape[1])
        is_excluded[rows, allowed_token_ids[requests[rows], places].long()] = False
        logits.masked_fill_(is_excluded, -torch.inf)
    rows, places = rows_and_places(num_logit_bias[requests])
    if len(rows):
        logits[rows, bias_token_ids[requests[rows], places].long()] += bias[requests[rows], places].to(
            logits.dtype
        )
    rows, places = rows_and_places(torch.where(pos + 1 < min_lens[requests], num_stop_token_ids[requests], 0))
    if len(rows):
        tokens = stop_token_ids[requests[rows], places].long()
        before = logits[rows, tokens]
        logits[rows, tokens] = -torch.inf
        if check_all_masked_rows:
            is_empty = restore_when_all_masked[requests].bool() & (logits.amax(-1) == -torch.inf)
            back = is_empty[rows] & before.isfinite()
            logits[rows[back], tokens[back]] = before[back]


def apply_grammar_bitmask(
    *,
    logits: torch.Tensor,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    bitmask: torch.Tensor,
    vocab_size: int,
    mask_stride: int,
) -> None:
    """Exclude tokens without a bit; a mask may be for a place past the request's rows."""
    requests, places = logits_indices // mask_stride, logits_indices % mask_stride
    starts = cu_num_logits[requests]
    has_row = places < cu_num_logits[requests + 1] - starts
    rows = (starts + places)[has_row]
    is_allowed = unpack_bits(bitmask[has_row], vocab_size)
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)


_BYTE_BITS: Final = 8


def topk_log_softmax(*, output: torch.Tensor, logits: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Write the log-probabilities of the given tokens alone."""
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
    """Write the token after each of the step's, whose log-probability is asked for."""
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
