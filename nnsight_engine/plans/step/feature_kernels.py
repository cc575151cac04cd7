"""Kernels of features: changes of their activations, and reads of single ones for conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from nnsight_engine.features.dictionary import Selection
from nnsight_engine.plans.features import PlannedFeatures
from nnsight_engine.plans.step.reads import ReadKernel, SiteValue
from nnsight_engine.plans.step.writes import narrowed, value_at


@dataclasses.dataclass(slots=True)
class FeatureChanges:
    """Activations ``a`` become ``gain * a + offset``, and the reconstruction's error stays as it is.

    Attributes:
        rows: The rows.
        selection: The features that any row changes.
        gain: ``[rows, features]`` float32; 1 where a row does not change a feature.
        offset: Likewise; 0 there.
        inputs: The values that the dictionary reads, ``[rows, input_width]`` in pieces, which kernels at
            other sites fill before this one runs; none for those at the site.
    """

    rows: torch.Tensor
    selection: Selection
    gain: torch.Tensor
    offset: torch.Tensor
    inputs: list[torch.Tensor]

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add to ``hidden`` in place."""
        x = torch.cat(self.inputs) if self.inputs else value_at(self.rows, hidden, residual, torch.float32)
        moves = self.selection.moves(x, self.gain, self.offset)
        hidden.index_add_(0, self.rows, narrowed(moves, hidden.dtype))


@dataclasses.dataclass(slots=True)
class FeatureParts(ReadKernel):
    """``out = activation of one feature`` for each row; ``column``, ``[rows, 1]``, is its place."""

    rows: torch.Tensor
    selection: Selection
    column: torch.Tensor
    out: torch.Tensor

    def read(self, value: SiteValue) -> None:
        """Compute one number per row."""
        found = self.selection.activations(value.sums(self.rows))
        self.out.copy_(found.gather(1, self.column).squeeze(1))


def union_of(several: Sequence[PlannedFeatures]) -> tuple[int, ...]:
    """Return all ids of features, ascending."""
    return tuple(sorted({feature for one in several for feature in one.ids}))
