"""Kernels that prepare a step's inputs and enter what it sampled; ``idx_mapping`` has state indices.

Block tables of several groups of the KV cache are lists here, addresses on a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from nnsight_engine.vllm_backend.cpu_kernels.ragged import count_in, lengths_of, rows_and_places


def prepare_prefill_inputs(
    *,
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    num_lookahead: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Write the tokens of prompts, and the ``num_lookahead`` tokens that follow in each; 0 past its end."""
    is_prefill = num_computed_tokens[idx_mapping] < prefill_lens[idx_mapping]
    if not is_prefill.any():
        return
    requests = idx_mapping[is_prefill]
    lengths = lengths_of(query_start_loc, len(idx_mapping))[is_prefill]
    num_computed = num_computed_tokens[requests]
    rows, places = rows_and_places(lengths)
    starts = query_start_loc[: len(idx_mapping)][is_prefill]
    input_ids[starts[rows] + places] = all_token_ids[requests[rows], num_computed[rows] + places]
    following = (num_computed + lengths)[:, None] + torch.arange(num_lookahead)
    tokens = all_token_ids[requests[:, None], following.clamp(max=all_token_ids.shape[1] - 1)]
    is_prompt = following < prefill_lens[requests][:, None]
    next_prefill_tokens[:, requests] = torch.where(is_prompt, tokens, 0).T


def prepare_pos_seq_lens(
    *,
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    max_num_reqs: int,
) -> None:
    """Write the position of each token, and the length of each request after the step; 0 for padding."""
    num_reqs = len(idx_mapping)
    lengths, num_computed = lengths_of(query_start_loc, num_reqs), num_computed_tokens[idx_mapping]
    seq_lens[:num_reqs] = num_computed + lengths
    seq_lens[num_reqs:max_num_reqs] = 0
    rows, places = rows_and_places(lengths)
    pos[: len(rows)] = num_computed[rows] + places


def combine_sampled_and_draft_tokens(
    *,
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
    num_new_sampled_tokens: int = 1,
) -> None:
    """Write sampled and draft tokens, and the token of each logits row; prompts keep their own."""
    num_reqs = len(idx_mapping)
    num_logits, ends = lengths_of(cu_num_logits, num_reqs), query_start_loc[1 : num_reqs + 1]
    first_rows = ends - num_logits
    rows, places = rows_and_places(num_logits)
    logits_indices[: len(rows)] = first_rows[rows] + places
    lengths, prefill = seq_lens[:num_reqs], prefill_len[idx_mapping]
    generates = lengths > prefill
    if num_new_sampled_tokens:
        is_sampled = generates & (lengths - num_logits >= prefill)
        last = last_sampled_tokens.view(-1)[idx_mapping[is_sampled]]
        input_ids[first_rows[is_sampled]] = last.to(input_ids.dtype)
    num_drafts = torch.where(generates, num_logits - num_new_sampled_tokens, 0).clamp(min=0)
    rows, places = rows_and_places(num_drafts)
    if len(rows):
        drafts = draft_tokens[idx_mapping[rows], places]
        input_ids[(ends - num_drafts)[rows] + places] = drafts.to(input_ids.dtype)


def get_num_sampled_and_rejected(
    *,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> None:
    """Count the refused drafts; a request within its prompt samples and rejects nothing."""
    num_reqs = len(idx_mapping)
    is_chunk = seq_lens[:num_reqs] < prefill_len[idx_mapping]
    num_sampled[:num_reqs].masked_fill_(is_chunk, 0)
    rejected = lengths_of(cu_num_logits, num_reqs) - num_sampled[:num_reqs]
    num_rejected[:num_reqs] = rejected.masked_fill(is_chunk, 0)


def post_update(
    *,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
) -> None:
    """Enter the sampled tokens into the state of each request; negative indices are left out."""
    num_reqs = len(idx_mapping)
    computed = -num_rejected[:num_reqs]
    if query_start_loc is not None:
        computed = computed + lengths_of(query_start_loc, num_reqs)
    is_real = idx_mapping >= 0
    requests, counts = idx_mapping[is_real], num_sampled[:num_reqs][is_real]
    sampled = sampled_tokens[:num_reqs][is_real]
    rows, places = rows_and_places(counts)
    owners, tokens = requests[rows], sampled[rows, places]
    all_token_ids[owners, total_len[owners] + places] = tokens.to(all_token_ids.dtype)
    if output_bin_counts is not None:
        count_in(output_bin_counts, owners, tokens.long())
    has_sampled = counts > 0
    last = sampled[has_sampled, counts[has_sampled].long() - 1]
    last_sampled_tokens.view(-1)[requests[has_sampled]] = last.to(last_sampled_tokens.dtype)
    total_len[requests] += counts.to(total_len.dtype)
    num_computed_tokens[requests] += computed[is_real].to(num_computed_tokens.dtype)


def post_update_num_computed_tokens(
    *, idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    num_computed_tokens[idx_mapping] += lengths_of(query_start_loc, len(idx_mapping))


def expand_idx_mapping(
    *,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    cu_num_logits: torch.Tensor,
) -> None:
    """Write, for each row of logits, its request and its place among that request's rows."""
    rows, places = rows_and_places(lengths_of(cu_num_logits, len(idx_mapping)))
    expanded_idx_mapping[: len(rows)] = idx_mapping[rows]
    expanded_local_pos[: len(rows)] = places


Tables = list[torch.Tensor]
"""The block table of each cache group, ``[requests, blocks]``."""

_CACHE_ELEMENT_BYTES: Final = 4


def apply_write(
    *,
    output: torch.Tensor | Tables,
    write_indices: torch.Tensor,
    write_starts: torch.Tensor,
    write_contents: torch.Tensor,
    write_cu_lens: torch.Tensor,
    write_group_ids: torch.Tensor | None,
) -> None:
    """Write each content into its row from its start on, the last one last."""
    content_start = 0
    groups = [0] * len(write_indices) if write_group_ids is None else write_group_ids.tolist()
    tables = [output] if isinstance(output, torch.Tensor) else output
    for group, row, start, end in zip(
        groups, write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist(), strict=True
    ):
        table = tables[group]
        target = table if table.dim() == 1 else table[row]
        first_element = row + start if table.dim() == 1 else start
        target[first_element : first_element + end - content_start] = write_contents[content_start:end]
        content_start = end


def gather_block_tables(
    *,
    grid: tuple[int, int],
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: Tables,
    dst_block_table_ptrs: Tables,
    num_blocks: torch.Tensor,
    num_reqs: int,
) -> None:
    """Copy the blocks of each request into its row of the batch; rows of padding become zero."""
    requests = batch_idx_to_req_idx[:num_reqs]
    for group, (source, target) in enumerate(zip(src_block_table_ptrs, dst_block_table_ptrs, strict=True)):
        target[num_reqs : grid[1]] = 0
        if num_reqs == 0:
            continue
        counts = num_blocks[group][requests]
        width = int(counts.max())
        is_own = torch.arange(width) < counts[:, None]
        target[:num_reqs, :width] = torch.where(is_own, source[requests, :width], target[:num_reqs, :width])


def compute_slot_mappings(
    *,
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: Tables,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    slot_mappings: torch.Tensor,
    pad_id: int,
) -> None:
    """Write the cache slot of each token, for each group; padding where a token has none."""
    requests = torch.repeat_interleave(idx_mapping, lengths_of(query_start_loc, len(idx_mapping)))
    num_tokens = len(requests)
    is_real = requests >= 0
    positions = pos[:num_tokens].masked_fill(~is_real, 0)
    for group, table in enumerate(block_table_ptrs):
        slots = slot_mappings[group]
        slots[num_tokens:max_num_tokens] = pad_id
        if not slot_mapping_enabled[group]:
            slots[:num_tokens] = pad_id
            continue
        size = int(block_sizes[group])
        blocks = table[requests, positions // size].long()
        slots[:num_tokens] = torch.where(is_real, blocks * size + positions % size, pad_id)


def zero_kv_blocks(
    *,
    seg_addrs: torch.Tensor,
    seg_block_strides: torch.Tensor,
    seg_page_sizes: torch.Tensor,
    block_ids: torch.Tensor,
) -> None:
    """Zero blocks in each segment of the cache; strides and sizes count elements of four bytes."""
    segments = zip(seg_addrs.tolist(), seg_block_strides.tolist(), seg_page_sizes.tolist(), strict=True)
    blocks = block_ids.tolist()
    for address, stride, size in segments:
        for block in blocks:
            ctypes.memset(address + block * stride * _CACHE_ELEMENT_BYTES, 0, size * _CACHE_ELEMENT_BYTES)
