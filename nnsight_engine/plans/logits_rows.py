"""Which of the rows that a plan wants logits of the engine has computed, as index tensors.

A steady decode step asks the same as the step before. So the tensors are made once for as long as plan and
batch stay as they are: on a GPU, each is a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.host_arena import to_device

RowArray = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)
class LogitsRows:
    """Where the rows that a plan wants logits of come from.

    Attributes:
        sample_rows: Rows that the engine samples from, ascending: for these this holds.
        own: Places, among the wanted rows, of those that the engine has logits of.
        sampled: Their places among the engine's.
        other: Places of the rest, or None where there is none.
        hidden: Their rows in the step.
    """

    sample_rows: RowArray
    own: torch.Tensor
    sampled: torch.Tensor
    other: torch.Tensor | None
    hidden: torch.Tensor

    @classmethod
    def of(cls, rows: RowArray, sample_rows: RowArray, device: torch.device) -> Self:
        """Return where ``rows``, ascending, come from."""
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
        """Whether the engine samples from the same rows as when this was made."""
        return np.array_equal(self.sample_rows, sample_rows)

    def gather(
        self,
        sampled: torch.Tensor,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the wanted rows' logits; only what the engine has not computed is computed.

        Args:
            sampled: The engine's, ``[requests, vocabulary]``.
            hidden: Output of the final norm, ``[tokens, hidden]``.
            compute_logits: The model's own unembedding.
        """
        if self.other is None:
            return sampled.index_select(0, self.sampled)
        logits = sampled.new_empty(len(self.own) + len(self.other), sampled.shape[1])
        logits[self.own] = sampled[self.sampled]
        logits[self.other] = compute_logits(hidden[self.hidden]).to(logits.dtype)
        return logits

    def put_back(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """Write what became of the rows where the engine samples from."""
        sampled[self.sampled] = logits[self.own]
