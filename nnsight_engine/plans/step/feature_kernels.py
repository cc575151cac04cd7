"""Kernels of features: changes of their activations, and reads of single ones for conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import torch

from nnsight_engine.features.dictionary import Selection
from nnsight_engine.plans.features import PlannedFeatures
from nnsight_engine.plans.step.reads import ReadKernel, SiteValue
from nnsight_engine.plans.step.writes import add_narrowed, value_at

Item = TypeVar("Item")
_MAX_NUMBERS: Final = 2**22
"""Most numbers of a matrix of rows or weights by features, unless one item alone has more."""


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
        overflows: As in ``add_narrowed``.
    """

    rows: torch.Tensor
    selection: Selection
    gain: torch.Tensor
    offset: torch.Tensor
    inputs: list[torch.Tensor]
    overflows: torch.Tensor | None = None

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Add to ``hidden`` in place."""
        x = torch.cat(self.inputs) if self.inputs else value_at(self.rows, hidden, residual)
        moves = self.selection.moves(x, self.gain, self.offset)
        add_narrowed(hidden, self.rows, moves, self.overflows)


@dataclasses.dataclass(slots=True)
class FeatureParts(ReadKernel):
    """``out = activation of one feature`` for each row.

    ``pieces`` have the first row and the row after the last, the features of some rows, and the place of each
    row's own among them, ``[rows, 1]``.
    """

    rows: torch.Tensor
    pieces: Sequence[tuple[int, int, Selection, torch.Tensor]]
    out: torch.Tensor

    def read(self, value: SiteValue) -> None:
        """Compute one number per row."""
        x = value.sums(self.rows)
        for start, stop, selection, column in self.pieces:
            found = selection.activations(x[start:stop])
            self.out[start:stop] = found.gather(1, column).squeeze(1)


def union_of(several: Iterable[PlannedFeatures]) -> tuple[int, ...]:
    """Return all ids of features, ascending."""
    return tuple(sorted({feature for one in several for feature in one.ids}))


def bounded(
    items: Iterable[Item], features_of: Callable[[Item], PlannedFeatures], rows_of: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Divide items with features of one dictionary, so that no product over a part of them is large.

    Each row of a part is computed with the features of all of its items.
    """
    part: list[Item] = []
    ids: set[int] = set()
    num_rows = 0
    for item in items:
        features = features_of(item)
        width = features.dictionary.config.input_width
        num_ids = len(ids) + sum(one not in ids for one in features.ids)
        if part and num_ids * max(num_rows + rows_of(item), width) > _MAX_NUMBERS:
            yield part
            part, ids, num_rows = [], set(), 0
        part.append(item)
        ids.update(features.ids)
        num_rows += rows_of(item)
    if part:
        yield part
