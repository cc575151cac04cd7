"""Which wanted logits rows the engine has already computed.

The index tensors are kept for as long as plan and batch stay the same: on a GPU, creating each one is a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.step.host_arena import to_device

RowArray = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)
class LogitsRows:
    """Source of the logits rows that a plan wants, valid for the engine's ``sample_rows`` (ascending).

    Of the wanted rows, ``own`` are among the engine's logits, at ``sampled``; ``other``, None if there are
    none, have to be computed from the step's rows ``hidden``.
    """

    sample_rows: RowArray
    own: torch.Tensor
    sampled: torch.Tensor
    other: torch.Tensor | None
    hidden: torch.Tensor

    @classmethod
    def of(cls, rows: RowArray, sample_rows: RowArray, device: torch.device) -> Self:
        place = np.minimum(np.searchsorted(sample_rows, rows), len(sample_rows) - 1)
        known = sample_rows[place] == rows

        def index(values: RowArray) -> torch.Tensor:
            return to_device(values, device)

        return cls(
            sample_rows=sample_rows.copy(),
            own=index(np.flatnonzero(known)),
            sampled=index(place[known]),
            other=None if known.all() else index(np.flatnonzero(~known)),
            hidden=index(rows[~known]),
        )

    def holds(self, sample_rows: RowArray) -> bool:
        return np.array_equal(self.sample_rows, sample_rows)

    def gather(
        self,
        sampled: torch.Tensor,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the wanted rows, computing those not in ``sampled``, ``[requests + drafts, vocabulary]``."""
        if self.other is None:
            return sampled.index_select(0, self.sampled)
        logits = sampled.new_empty(len(self.own) + len(self.other), sampled.shape[1])
        logits[self.own] = sampled[self.sampled]
        logits[self.other] = compute_logits(hidden[self.hidden]).to(logits.dtype)
        return logits

    def put_back(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        sampled[self.sampled] = logits[self.own]
