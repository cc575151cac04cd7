"""Kernels for the KV cache's blocks; tables of several groups are lists here, addresses on a GPU."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from nnsight_engine.vllm_backend.cpu_kernels.ragged import lengths_of

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
    begin = 0
    groups = [0] * len(write_indices) if write_group_ids is None else write_group_ids.tolist()
    tables = [output] if isinstance(output, torch.Tensor) else output
    for group, row, start, end in zip(
        groups, write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist(), strict=True
    ):
        table = tables[group]
        target = table if table.dim() == 1 else table[row]
        first = row + start if table.dim() == 1 else start
        target[first : first + end - begin] = write_contents[begin:end]
        begin = end


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
