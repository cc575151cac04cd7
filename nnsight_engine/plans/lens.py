"""What a lens tells of logits: the most likely tokens, and how likely chosen ones are.

In float32, whatever the model computes in. Float32 copies of many rows over the whole vocabulary are large,
and on a CPU the pages of fresh ones cost more than the arithmetic: so a few rows at a time pass through two
buffers that are kept. The harvest calls this, some rows of all requests and layers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from nnsight_engine.plans.host_arena import to_device

ROWS_AT_ONCE: Final = 16
"""Rows that the buffers take: some MB, near a processor's caches."""


class LensReader:
    """Reads logits of one model; its buffers are made with the first ones."""

    def __init__(self) -> None:
        """Hold no memory yet."""
        self._wide = torch.empty(0)
        self._logprobs = torch.empty(0)

    def read(self, logits: torch.Tensor, top_k: int, targets: Sequence[int]) -> list[torch.Tensor]:
        """Return ids and log-probabilities of the likeliest, then those of the targets and their ranks.

        Args:
            logits: ``[rows, vocabulary]``.
            top_k: How many of the likeliest.
            targets: Token ids.

        Returns:
            Four tensors ``[rows, …]``: int32, float32, float32 and int32.
        """
        with torch.inference_mode():
            self._fit(logits)
            index = to_device(np.asarray(targets, np.int64), logits.device)
            parts = [self._read(rows, top_k, index) for rows in logits.split(ROWS_AT_ONCE)]
            return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _fit(self, logits: torch.Tensor) -> None:
        shape = (ROWS_AT_ONCE, logits.shape[1])
        if self._wide.shape != shape or self._wide.device != logits.device:
            self._wide = torch.empty(shape, dtype=torch.float32, device=logits.device)
            self._logprobs = torch.empty_like(self._wide)

    def _read(self, logits: torch.Tensor, top_k: int, targets: torch.Tensor) -> list[torch.Tensor]:
        """Return the same of at most ``ROWS_AT_ONCE`` rows, in memory of its own."""
        wide, logprobs = self._wide[: len(logits)], self._logprobs[: len(logits)]
        wide.copy_(logits)
        torch.log_softmax(wide, dim=-1, out=logprobs)
        top = logprobs.topk(top_k, dim=-1)
        of_targets = logprobs.index_select(-1, targets)
        ranks = [(logprobs > own.unsqueeze(-1)).sum(dim=-1) + 1 for own in of_targets.unbind(-1)]
        rank = torch.stack(ranks, dim=-1) if ranks else torch.empty_like(of_targets)
        return [top.indices.to(torch.int32), top.values, of_targets, rank.to(torch.int32)]
