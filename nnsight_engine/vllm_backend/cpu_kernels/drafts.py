"""Kernels that propose drafts; ``num_rejected`` counts the drafts that this step refused, by batch row."""

from __future__ import annotations

import torch

from nnsight_engine.vllm_backend.cpu_kernels.ragged import lengths_of, rows_and_places


def ngram_scan(
    *,
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    scratch: torch.Tensor,
    min_n: int,
    max_n: int,
) -> None:
    """Score where the end of each text occurred before, the longest match first, then the last one.

    A score is ``size * base + place + 1``, by size and place of the match; 0 without a match.
    """
    lengths, num_reqs = total_len[idx_mapping].long(), len(idx_mapping)
    text = token_ids[idx_mapping, : int(lengths.max())]
    base = token_ids.shape[1] + 1
    best = torch.zeros(text.shape, dtype=torch.int64)
    for size in range(min_n, min(max_n, text.shape[1] - 1) + 1):
        suffix = text.gather(1, (lengths[:, None] - size + torch.arange(size)).clamp(min=0))
        is_match = (text.unfold(1, size, 1) == suffix[:, None]).all(-1)
        places = torch.arange(is_match.shape[1])
        is_match &= places < lengths[:, None] - size
        scores = best[:, : len(places)]
        torch.where(is_match, size * base + places + 1, scores, out=scores)
    may_draft = (num_sampled[:num_reqs] > 0) & (lengths >= min_n)
    scratch[:num_reqs] = 0
    scratch[:num_reqs, 0] = best.amax(-1) * may_draft


def ngram_finalize(
    *,
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    last_sampled: torch.Tensor,
    scratch: torch.Tensor,
    drafts: torch.Tensor,
    k: int,
) -> None:
    """Draft the ``k`` tokens that followed the scored match; the last sampled token where nothing did."""
    num_reqs, width = len(idx_mapping), token_ids.shape[1]
    score = scratch[:num_reqs, 0]
    base = width + 1  # as in ``ngram_scan``
    size, place = (score - 1) // base, (score - 1) % base
    positions = (place + size)[:, None] + torch.arange(k)
    has_match = (score > 0) & (num_sampled[:num_reqs] > 0)
    is_text = has_match[:, None] & (positions < total_len[idx_mapping][:, None])
    proposed = token_ids[idx_mapping[:, None], positions.clamp(0, width - 1)].long()
    drafts[:num_reqs] = torch.where(is_text, proposed, last_sampled[idx_mapping][:, None])


def prepare_own_prefill(
    *,
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    last_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    last_token_indices: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
) -> None:
    """Write the inputs of an independent draft model: accepted tokens, the sampled one, then zeros."""
    num_reqs = len(idx_mapping)
    lengths, starts = lengths_of(query_start_loc, num_reqs), query_start_loc[:num_reqs]
    out_starts = starts + torch.arange(num_reqs)
    num_accepted = lengths - num_rejected[:num_reqs]
    rows, places = rows_and_places(lengths + 1)
    target = target_input_ids[(starts[rows] + places).clamp(max=len(target_input_ids) - 1)]
    sampled = last_sampled.view(-1)[idx_mapping][rows].to(target.dtype)
    ids = torch.where(places < num_accepted[rows], target, 0)
    out_input_ids[: len(rows)] = torch.where(places == num_accepted[rows], sampled, ids)
    out_positions[: len(rows)] = (target_positions[starts][rows] + places).clamp(max=max_model_len - 1)
    last_token_indices[:num_reqs] = out_starts + num_accepted
    out_query_start_loc[:num_reqs] = out_starts
    out_seq_lens[:num_reqs] = (seq_lens[:num_reqs] + 1).clamp(max=max_model_len)
    _pad(last_token_indices, out_query_start_loc, out_seq_lens, num_reqs, max_num_reqs, len(rows))


def prepare_dependent_prefill(
    *,
    last_token_indices: torch.Tensor,
    draft_current_step: torch.Tensor,
    draft_input_ids: torch.Tensor,
    draft_positions: torch.Tensor,
    draft_query_start_loc: torch.Tensor,
    draft_seq_lens: torch.Tensor,
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_num_reqs: int,
) -> None:
    """Write the inputs of a draft model that reads the target's states: at each position, the next token.

    After the last accepted token, that is the sampled one, or within a prompt the next of the prompt.
    """
    num_reqs = len(idx_mapping)
    starts = query_start_loc[:num_reqs]
    num_accepted = lengths_of(query_start_loc, num_reqs) - num_rejected[:num_reqs]
    rows, places = rows_and_places(num_accepted)
    index = starts[rows] + places
    draft_positions[index] = target_positions[index]
    inner = index[places > 0]
    draft_input_ids[inner - 1] = target_input_ids[inner]
    last = (starts + num_accepted - 1).long()
    sampled = last_sampled.view(-1)[idx_mapping].to(draft_input_ids.dtype)
    following = next_prefill_tokens.view(-1)[idx_mapping].to(draft_input_ids.dtype)
    draft_input_ids[last] = torch.where(num_sampled[:num_reqs] > 0, sampled, following)
    draft_current_step.fill_(0)
    last_token_indices[:num_reqs] = last
    draft_query_start_loc[:num_reqs] = starts
    draft_seq_lens[:num_reqs] = seq_lens[:num_reqs]
    num_tokens = int(query_start_loc[num_reqs])
    _pad(last_token_indices, draft_query_start_loc, draft_seq_lens, num_reqs, max_num_reqs, num_tokens)


def prepare_decode_inputs(
    *,
    draft_tokens: torch.Tensor,
    target_seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_src_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_model_len: int,
    max_num_reqs: int,
    advance_draft_positions: bool,
) -> None:
    """Write the inputs of the second draft: the first one, a token for each request."""
    num_reqs = len(draft_tokens)
    query_start_loc[: max_num_reqs + 1] = torch.arange(max_num_reqs + 1).clamp(max=num_reqs)
    first_drafts = draft_tokens if draft_tokens.dim() == 1 else draft_tokens[:, 0]
    input_ids[:num_reqs] = first_drafts.to(input_ids.dtype)
    sample_src_positions[:num_reqs] += 1
    seq_lens[:num_reqs] = target_seq_lens[:num_reqs] - num_rejected[:num_reqs]
    seq_lens[num_reqs:max_num_reqs] = 0
    if advance_draft_positions:
        _advance(positions[:num_reqs], seq_lens[:num_reqs], max_model_len)


def update_draft_inputs(
    *,
    grid: tuple[int],
    output_draft_tokens: torch.Tensor,
    next_input_hidden_states: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    sample_src_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    current_draft_step: torch.Tensor,
    hidden_states: torch.Tensor,
    max_model_len: int,
    num_speculative_steps: int,
    advance_draft_positions: bool,
) -> None:
    """Store the drafts of a step of the draft model, and write the inputs of its next one, if any."""
    rows, step = slice(grid[0]), int(current_draft_step)
    output_draft_tokens[rows, step] = draft_tokens[rows].to(output_draft_tokens.dtype)
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions[rows] += 1
    input_ids[rows] = draft_tokens[rows].to(input_ids.dtype)
    next_input_hidden_states[rows] = hidden_states[rows]
    if advance_draft_positions:
        _advance(positions[rows], seq_lens[rows], max_model_len)


def _advance(positions: torch.Tensor, seq_lens: torch.Tensor, max_model_len: int) -> None:
    positions.add_(1).clamp_(max=max_model_len - 1)
    seq_lens.add_(1).clamp_(max=max_model_len)


def _pad(
    last_indices: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    num_reqs: int,
    max_num_reqs: int,
    num_tokens: int,
) -> None:
    """Write rows of padding, which have no tokens, up to the largest number of requests."""
    last_indices[num_reqs:max_num_reqs] = 0
    starts[num_reqs : max_num_reqs + 1] = num_tokens
    lengths[num_reqs:max_num_reqs] = 0
