"""Kernels that allow, prefer and exclude tokens: a request's lists of tokens, and its grammar."""

from __future__ import annotations

from typing import Final

import torch

from nnsight_engine.vllm_backend.cpu_kernels.launches import Functions
from nnsight_engine.vllm_backend.cpu_kernels.ragged import rows_and_places, unpack_bits


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
    """Exclude all but the allowed tokens, add biases, then exclude stop tokens before the shortest length.

    A request may ask for its stop tokens back where nothing else is left.
    """
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
    """Exclude the tokens whose bit is not set.

    A mask's index is its request times ``mask_stride`` plus a place, which may be past the request's rows.
    """
    requests, places = logits_indices // mask_stride, logits_indices % mask_stride
    starts = cu_num_logits[requests]
    has_row = places < cu_num_logits[requests + 1] - starts
    rows = (starts + places)[has_row]
    is_allowed = unpack_bits(bitmask[has_row], vocab_size)
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)


FUNCTIONS: Final[Functions] = {
    "gpu.sample.logit_bias:_bias_kernel": apply_logit_bias,
    "gpu.structured_outputs:_apply_grammar_bitmask_kernel": apply_grammar_bitmask,
}
