"""The logit lens over logits, in float32, whatever dtype the model uses.

Float32 copies over the whole vocabulary are large, and on a CPU page faults on fresh memory cost more than
the arithmetic: so a few rows at a time are computed in two buffers that are reused.
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
    def __init__(self) -> None:
        self._wide = torch.empty(0)
        self._logprobs = torch.empty(0)

    def read(self, logits: torch.Tensor, top_k: int, targets: Sequence[int]) -> list[torch.Tensor]:
        """Return ids and log-probabilities of the likeliest, then log-probabilities and ranks of the targets.

        ``logits`` are ``[rows, vocabulary]``; the results ``[rows, …]``, int32 and float32.
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
