"""Kernels that change logits by what a request's text has so far: penalties, bad words and replayed tokens.

Logits rows of one request follow each other, and each is judged with the drafts before it:
``expanded_local_pos`` is a row's place in its request. Its rows have tokens too: first the last sampled one,
then the drafts.
"""

from __future__ import annotations

from typing import Final

import torch

from nnsight_engine.vllm_backend.cpu_kernels.launches import Functions
from nnsight_engine.vllm_backend.cpu_kernels.ragged import (
    WORD_BITS,
    count_in,
    pack_bits,
    rows_and_places,
    unpack_bits,
)


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
    """Lower the logits of tokens in the prompt and the text, drafts included."""
    repetition, frequency, presence = (
        penalty[expanded_idx_mapping] for penalty in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    own = ((repetition != 1) | (frequency != 0) | (presence != 0)).nonzero().view(-1)
    requests, places = expanded_idx_mapping[own], expanded_local_pos[own]
    counts = output_bin_counts[requests]
    rows, before = rows_and_places(places)
    count_in(counts, rows, token_ids[(own - places)[rows] + before + 1].long())
    is_seen = counts > 0
    changed = logits[own].float()
    repetition = repetition[own][:, None]
    if (repetition != 1).any():
        is_repeated = is_seen | unpack_bits(prompt_bin_mask[requests], vocab_size)
        scale = torch.where(is_repeated, repetition, 1.0)
        changed *= torch.where(changed > 0, 1 / scale, scale)
    changed -= frequency[own][:, None] * counts
    changed -= presence[own][:, None] * is_seen
    logits[own] = changed.to(logits.dtype)


def bincount(
    *,
    expanded_idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
) -> None:
    """Mark the tokens of new requests' prompts, and count those of their text so far, in tables of zeros."""
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
        at = length - num_before + index
        committed = (prompt_len[requests] + at).clamp(0, all_token_ids.shape[1] - 1)
        drafted = (rows - drafts + at - num_output + 1).clamp(0, len(input_ids) - 1)
        actual = torch.where(at < num_output, all_token_ids[requests, committed], input_ids[drafted])
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
    """Replace the sampled token by the given one, for requests that have given one for this step."""
    step = total_len[idx_mapping] - prompt_len[idx_mapping]
    own = (idx_mapping >= 0) & (step >= 0) & (step < trace_len[idx_mapping])
    sampled[own] = trace_token_ids[idx_mapping[own], step[own]].to(sampled.dtype)


FUNCTIONS: Final[Functions] = {
    "gpu.sample.min_p:_min_p_kernel": apply_min_p,
    "gpu.sample.penalties:_penalties_kernel": apply_penalties,
    "gpu.sample.penalties:_bincount_kernel": bincount,
    "gpu.sample.bad_words:_bad_words_kernel": apply_bad_words,
    "gpu.sample.trace_replay:_trace_replay_kernel": replay_trace,
}
