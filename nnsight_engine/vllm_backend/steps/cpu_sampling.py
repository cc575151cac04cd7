"""Sampling beside drafts on a CPU, where vLLM 0.32 has two faults.

- It passes the temperatures of a batch to its CPU kernel as a copy in whole numbers, and reads the result
  from memory that was never written. So one request with a temperature spoils the tokens of all requests of
  its batch, greedy ones included.
- ``top_k`` raises an error in a step without drafts, which ends the engine.

Safeguard: both functions are replaced.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.v1.sample import rejection_sampler

_APPLY_CONSTRAINTS: Final = rejection_sampler.apply_sampling_constraints


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> torch.Tensor:
    """Return each request's number once for each of its tokens.

    Args:
        x: By request.
        cu_num_tokens: By request, the number of tokens up to and including its own.
        num_tokens: Number of all tokens.
        replace_from: Number that is replaced.
        replace_to: Number that stands for it.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def apply_sampling_constraints(
    logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any
) -> torch.Tensor:
    """Return the logits of drafts, ``[drafts, vocabulary]``, as the sampling parameters change them."""
    if not len(logits):
        return logits
    changed: torch.Tensor = _APPLY_CONSTRAINTS(logits, cu_num_draft_tokens, sampling_metadata)
    return changed


def mend_sampling_beside_drafts() -> None:
    """Replace vLLM's functions in this process."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints
