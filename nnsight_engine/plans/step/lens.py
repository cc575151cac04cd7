"""The logit lens over logits: the most likely tokens, and the log-probabilities of chosen tokens.

Computed in float32, whatever dtype the model uses. Float32 copies of many rows over the whole vocabulary are
large, and on a CPU page faults on fresh memory cost more than the arithmetic: so a few rows at a time are
computed in two buffers that are reused. ``collection`` calls this with rows of all requests and layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from nnsight_engine.plans.step.host_arena import to_device

ROWS_AT_ONCE: Final = 16
"""Number of rows in the buffers: some MB, near the size of a processor's caches."""


class LensReader:
    """Applies the lens to the logits of one model; the buffers are allocated on first use."""

    def __init__(self) -> None:
        self._wide = torch.empty(0)
        self._logprobs = torch.empty(0)

    def read(self, logits: torch.Tensor, top_k: int, targets: Sequence[int]) -> list[torch.Tensor]:
        """Return ids and log-probabilities of the likeliest, then those of the targets and their ranks.

        Args:
            logits: ``[rows, vocabulary]``.
            top_k: Number of most likely tokens.
            targets: Token ids.

        Returns:
            Four tensors ``[rows, …]``: ids int32, log-probabilities float32, those of the targets float32 and
            ranks of the targets int32.
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
        """Return the same for at most ``ROWS_AT_ONCE`` rows; the results do not alias the buffers."""
        wide, logprobs = self._wide[: len(logits)], self._logprobs[: len(logits)]
        wide.copy_(logits)
        torch.log_softmax(wide, dim=-1, out=logprobs)
        top = logprobs.topk(top_k, dim=-1)
        of_targets = logprobs.index_select(-1, targets)
        ranks = [(logprobs > own.unsqueeze(-1)).sum(dim=-1) + 1 for own in of_targets.unbind(-1)]
        rank = torch.stack(ranks, dim=-1) if ranks else torch.empty_like(of_targets)
        return [top.indices.to(torch.int32), top.values, of_targets, rank.to(torch.int32)]
