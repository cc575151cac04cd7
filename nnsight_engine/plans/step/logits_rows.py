"""Index tensors that say which wanted logits rows the engine has already computed.

A steady decode step wants the same rows as the step before. So the tensors are kept for as long as plan and
batch stay the same: on a GPU, creating each one is a copy.
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
    """Source of the logits rows that a plan wants.

    Attributes:
        sample_rows: Rows that the engine samples from, ascending; the other attributes are valid for these.
        own: Indices, among the wanted rows, of those whose logits the engine has.
        sampled: Indices of the same rows among the engine's logits.
        other: Indices of the remaining wanted rows, or None if there are none.
        hidden: Rows of the remaining ones in the step's tensors.
    """

    sample_rows: RowArray
    own: torch.Tensor
    sampled: torch.Tensor
    other: torch.Tensor | None
    hidden: torch.Tensor

    @classmethod
    def of(cls, rows: RowArray, sample_rows: RowArray, device: torch.device) -> Self:
        """Return the source of each of ``rows``, which ascend."""
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
        """Return whether the engine samples from the same rows as when this was created."""
        return np.array_equal(self.sample_rows, sample_rows)

    def gather(
        self,
        sampled: torch.Tensor,
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the logits of the wanted rows, computing only those that the engine has not computed.

        Args:
            sampled: The engine's logits, ``[requests + drafts, vocabulary]``.
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
        """Write the rows that the engine samples from back into its logits."""
        sampled[self.sampled] = logits[self.own]
