"""Kernels of what some requests keep: rotary positions in several dimensions, prompt embeddings, states.

Where prefixes are cached, a recurrent layer's state is in the block of the request's last token.
"""

from __future__ import annotations

import ctypes
import dataclasses

import torch

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
        from_prompt = prefill_positions[num_dims * requests + dim, within]
        positions[dim, : len(rows)] = torch.where(is_prompt, from_prompt, counted + prefill_delta[requests])


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
        start_position, num_given = int(num_computed_tokens[request]), int(embeds_lens[request])
        count = min(lengths[row], num_given - start_position)
        if count <= 0:
            continue
        rows = slice(start_position, start_position + count)
        embeds = tensor_at(addresses[request], num_given * hidden_size, inputs_embeds.dtype)
        target = inputs_embeds[starts[row] : starts[row] + count]
        is_token = torch.zeros(count, dtype=torch.bool)
        if masks[request]:
            is_token = tensor_at(masks[request], num_given, torch.bool)[rows]
        target[~is_token] = embeds.view(num_given, hidden_size)[rows][~is_token]


def scatter_num_accepted(
    *, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_accepted: torch.Tensor
) -> None:
    """Store how many tokens each request accepted, at least one; negative indices are left out."""
    is_real = idx_mapping >= 0
    accepted = num_sampled[: len(idx_mapping)][is_real].clamp(min=1)
    num_accepted[idx_mapping[is_real]] = accepted.to(num_accepted.dtype)


def fill_num_accepted(*, idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_sampled: int) -> None:
    num_accepted[idx_mapping[idx_mapping >= 0]] = num_sampled


@dataclasses.dataclass(frozen=True, slots=True)
class _States:
    """All state tensors of a model, and the block tables, by address.

    Attributes:
        state_conv_widths: Tokens in each state's window of a convolution; 0 for any other state.
        state_dim_row_count: Rows of such a window where each channel is a row, by ``conv_state_dim_first``.
        state_dim_row_stride: Bytes from one such row to the next.
    """

    block_table_ptrs: torch.Tensor
    block_table_stride_req: int
    state_base_addrs: torch.Tensor
    state_block_strides: torch.Tensor
    state_elem_sizes: torch.Tensor
    state_inner_sizes: torch.Tensor
    state_conv_widths: torch.Tensor
    state_group_indices: torch.Tensor
    state_dim_row_count: torch.Tensor
    state_dim_row_stride: torch.Tensor
    conv_state_dim_first: bool

    def copy(self, request: int, source: int, target: int, num_skipped: int) -> None:
        """Copy all states of a request from one of its blocks to another.

        ``num_skipped`` tokens leave the window of a convolution; any other state is so many blocks further.
        """
        for state in range(len(self.state_base_addrs)):
            width = int(self.state_conv_widths[state])
            further = 0 if width else num_skipped
            begin = self._address(state, request, source + further)
            end = self._address(state, request, target)
            size = int(self.state_elem_sizes[state])
            if not width:
                ctypes.memmove(end, begin, size * int(self.state_inner_sizes[state]))
            elif self.conv_state_dim_first:
                stride = int(self.state_dim_row_stride[state])
                for offset in range(0, stride * int(self.state_dim_row_count[state]), stride):
                    kept = (width - num_skipped) * size
                    ctypes.memmove(end + offset, begin + offset + num_skipped * size, kept)
            else:
                token = size * int(self.state_inner_sizes[state])
                ctypes.memmove(end, begin + num_skipped * token, (width - num_skipped) * token)

    def _address(self, state: int, request: int, column: int) -> int:
        """Return where a state is in the cache block that is in this column of a request's block table."""
        table = int(self.block_table_ptrs[self.state_group_indices[state]])
        entry = table + ctypes.sizeof(ctypes.c_int32) * (request * self.block_table_stride_req + column)
        block = ctypes.c_int32.from_address(entry).value
        return int(self.state_base_addrs[state]) + block * int(self.state_block_strides[state])


def find_sources(
    *,
    idx_mapping: torch.Tensor,
    state_idx: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    src_col: torch.Tensor,
    src_off: torch.Tensor,
    num_reqs: int,
    mamba_block_size: int,
) -> None:
    """Store which block has each request's recurrent state, and advance to the one the step ends in."""
    requests = idx_mapping[:num_reqs]
    before = state_idx[requests]
    src_col[requests] = before
    src_off[requests] = (num_accepted_tokens[requests] - 1).clamp(min=0)
    num_computed = num_computed_tokens[requests] + lengths_of(query_start_loc, num_reqs)
    after = ((num_computed + mamba_block_size - 1) // mamba_block_size - 1).to(state_idx.dtype)
    state_idx[requests] = after
    num_accepted_tokens[requests[(before >= 0) & (before != after)]] = 1


def copy_before_step(
    *,
    mamba_state_idx: torch.Tensor,
    src_col: torch.Tensor,
    token_bias: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_reqs: int,
    block_table_ptrs: torch.Tensor,
    block_table_stride_req: int,
    state_base_addrs: torch.Tensor,
    state_block_strides: torch.Tensor,
    state_elem_sizes: torch.Tensor,
    state_inner_sizes: torch.Tensor,
    state_conv_widths: torch.Tensor,
    state_group_indices: torch.Tensor,
    state_dim_row_count: torch.Tensor,
    state_dim_row_stride: torch.Tensor,
    conv_state_dim_first: bool,
) -> None:
    """Copy states to the block that the step ends in, where that is another one."""
    states = _States(
        block_table_ptrs, block_table_stride_req, state_base_addrs, state_block_strides, state_elem_sizes,
        state_inner_sizes, state_conv_widths, state_group_indices, state_dim_row_count, state_dim_row_stride,
        conv_state_dim_first,
    )  # fmt: skip
    for request in idx_mapping[:num_reqs].tolist():
        source, target = int(src_col[request]), int(mamba_state_idx[request])
        if request >= 0 and 0 <= source != target:
            states.copy(request, source, target, int(token_bias[request]))


def copy_after_step(
    *,
    num_accepted_tokens: torch.Tensor,
    mamba_state_idx: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens_out: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_reqs: int,
    block_size: int,
    block_table_ptrs: torch.Tensor,
    block_table_stride_req: int,
    state_base_addrs: torch.Tensor,
    state_block_strides: torch.Tensor,
    state_elem_sizes: torch.Tensor,
    state_inner_sizes: torch.Tensor,
    state_conv_widths: torch.Tensor,
    state_group_indices: torch.Tensor,
    state_dim_row_count: torch.Tensor,
    state_dim_row_stride: torch.Tensor,
    conv_state_dim_first: bool,
) -> None:
    """Copy states to the last full block, where a step with drafts has filled one."""
    states = _States(
        block_table_ptrs, block_table_stride_req, state_base_addrs, state_block_strides, state_elem_sizes,
        state_inner_sizes, state_conv_widths, state_group_indices, state_dim_row_count, state_dim_row_stride,
        conv_state_dim_first,
    )  # fmt: skip
    for request in idx_mapping[:num_reqs].tolist():
        if request < 0:
            continue
        num_computed = int(num_computed_tokens[request])
        num_running = num_computed - int(num_accepted_tokens[request]) + 1
        num_aligned = num_computed // block_size * block_size
        if num_aligned < num_running:
            continue
        source, target = int(mamba_state_idx[request]), num_aligned // block_size - 1
        num_skipped = num_aligned - num_running
        if source == target:
            num_accepted_tokens_out[request] = 1
        if source != target or num_skipped:
            states.copy(request, source, target, num_skipped)
