"""Kernels of features: changes of their activations, and reads of them for results and for conditions.

Values that a step has read take few products with a dictionary, for all requests together.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
import torch

from nnsight_engine.features.dictionary import Dictionary, Selection
from nnsight_engine.plans.request_plan import OperationKind, PlannedDictionary, PlannedFeatures
from nnsight_engine.plans.step.context import SiteKey
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.operation_rows import OperationRows
from nnsight_engine.plans.step.plan import GroupedReads, ReadGroup
from nnsight_engine.plans.step.read_kernels import ReadKernel, SiteValue
from nnsight_engine.plans.step.table import RowArray

Item = TypeVar("Item")
_MAX_NUMBERS: Final = 2**22
"""Most numbers of a matrix of rows or weights by features, unless one item alone has more."""


@dataclasses.dataclass(slots=True)
class FeatureChanges(ReadKernel):
    """What new activations ``gain * a + offset`` add to each row, ``out``; see ``Selection.moves``.

    ``gain`` is 1 and ``offset`` 0 where a row does not change a feature, ``[rows, features]``. ``inputs`` are
    what the dictionary reads, filled by other sites' instructions before; none for the site's own value.
    """

    rows: torch.Tensor
    selection: Selection
    gain: torch.Tensor
    offset: torch.Tensor
    inputs: list[torch.Tensor]
    out: torch.Tensor

    def read(self, value: SiteValue) -> None:
        x = torch.cat(self.inputs) if self.inputs else value.sums(self.rows)
        self.out.copy_(self.selection.moves(x, self.gain, self.offset))


@dataclasses.dataclass(slots=True)
class ChangedRows:
    """Rows at one site at which an operation changes features; ``inputs`` as in ``FeatureChanges``."""

    item: OperationRows
    key: SiteKey
    inputs: torch.Tensor | None

    @property
    def rows(self) -> RowArray:
        return self.item.rows_at(self.key)

    @property
    def features(self) -> PlannedFeatures:
        return self.item.active.features


def changes_of(changed: list[ChangedRows], out: torch.Tensor) -> FeatureChanges:
    """Return a kernel for rows with the same dictionary, site and place in the order of work at that site.

    ``out``, ``[rows, width]``, receives what is to be added to each row; ``inputs`` of ``changed`` are what
    the dictionary reads if that comes from another site.
    """
    ids = union_of(rows_changed.features for rows_changed in changed)
    rows = to_device(np.concatenate([rows_changed.rows for rows_changed in changed]), out.device)
    gain, offset = np.ones((len(rows), len(ids)), np.float32), np.zeros((len(rows), len(ids)), np.float32)
    start, all_ids = 0, np.asarray(ids)
    for rows_changed in changed:
        columns = np.searchsorted(all_ids, np.asarray(rows_changed.features.ids))
        places = slice(start, start + len(rows_changed.rows))
        gain[places, columns], offset[places, columns] = (
            rows_changed.features.gains,
            rows_changed.features.offsets,
        )
        start = places.stop
    return FeatureChanges(
        rows,
        changed[0].item.active.dictionary.selection(ids),
        to_device(gain, out.device),
        to_device(offset, out.device),
        [rows_changed.inputs for rows_changed in changed if rows_changed.inputs is not None],
        out,
    )


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
        x = value.sums(self.rows)
        for start, stop, selection, column in self.pieces:
            activations = selection.activations(x[start:stop])
            self.out[start:stop] = activations.gather(1, column).squeeze(1)


def union_of(features_of_each: Iterable[PlannedFeatures]) -> tuple[int, ...]:
    return tuple(sorted({feature for features in features_of_each for feature in features.ids}))


def bounded(
    items: Iterable[Item], features_of: Callable[[Item], PlannedFeatures], rows_of: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Divide items with features of one dictionary, so that no product over a part of them is large."""
    batch: list[Item] = []
    ids: set[int] = set()
    num_rows = 0
    for item in items:
        features = features_of(item)
        width = features.dictionary.config.input_width
        num_ids = len(ids) + sum(feature not in ids for feature in features.ids)
        if batch and num_ids * max(num_rows + rows_of(item), width) > _MAX_NUMBERS:
            yield batch
            batch, ids, num_rows = [], set(), 0
        batch.append(item)
        ids.update(features.ids)
        num_rows += rows_of(item)
    if batch:
        yield batch


Parts = dict[int, list[torch.Tensor]]
"""The parts of the records of groups of reads, by the ``id`` of the group."""


def plan_feature_reads(reads: Sequence[ReadGroup]) -> list[GroupedReads]:
    """Group the reads that one product with a dictionary serves; those of the most active features apart."""
    most_active: dict[PlannedDictionary, list[ReadGroup]] = defaultdict(list)
    by_id: dict[PlannedDictionary, list[ReadGroup]] = defaultdict(list)
    for group in reads:
        active = group.slices[0].active
        if active.op.kind is OperationKind.FEATURES:
            chosen = most_active if active.features.top_k else by_id
            chosen[active.features.dictionary].append(group)
    grouped: list[GroupedReads] = [_top_features(groups) for groups in most_active.values()]
    for groups in by_id.values():
        parts = bounded(
            groups, lambda group: group.slices[0].active.features, lambda group: group.slices[-1].stop
        )
        grouped += map(_given_features, parts)
    return grouped


@dataclasses.dataclass(slots=True)
class TopFeatures:
    """The most active features, of groups that share a dictionary; ``numbers`` are the ``top_k`` of each."""

    groups: list[ReadGroup]
    dictionary: Dictionary
    numbers: list[int]

    def read(self) -> Parts:
        """Return ids and activations, both ``[rows, k]``, by the ``id`` of each group."""
        with torch.inference_mode():
            ids, activations = self.dictionary.top(_values(self.groups), max(self.numbers))
        sizes = [len(group.buffers[0]) for group in self.groups]
        pieces = zip(ids.to(torch.int32).split(sizes), activations.split(sizes), strict=True)
        return {
            id(group): [top_ids[:, :k], values[:, :k]]
            for group, k, (top_ids, values) in zip(self.groups, self.numbers, pieces, strict=True)
        }

    def alone(self) -> list[GroupedReads]:
        return [_top_features([group]) for group in self.groups]


@dataclasses.dataclass(slots=True)
class GivenFeatures:
    """Features that are given by id: ``columns`` are their places in the selection, for each group."""

    groups: list[ReadGroup]
    selection: Selection
    columns: list[torch.Tensor]

    def read(self) -> Parts:
        """Return activations, ``[rows, features]``, by the ``id`` of each group."""
        with torch.inference_mode():
            activations = self.selection.activations(_values(self.groups))
        pieces = activations.split([len(group.buffers[0]) for group in self.groups])
        return {
            id(group): [values.index_select(1, columns)]
            for group, columns, values in zip(self.groups, self.columns, pieces, strict=True)
        }

    def alone(self) -> list[GroupedReads]:
        return [_given_features([group]) for group in self.groups]


def _top_features(groups: list[ReadGroup]) -> GroupedReads:
    actives = [group.slices[0].active for group in groups]
    numbers = [active.features.top_k for active in actives]
    return TopFeatures(groups, actives[0].dictionary.dictionary, numbers)


def _given_features(groups: list[ReadGroup]) -> GroupedReads:
    """Return one read of the union of the groups' features, of which each group gets its columns."""
    actives = [group.slices[0].active for group in groups]
    ids = union_of(active.features for active in actives)
    all_ids, device = np.asarray(ids), groups[0].buffers[0].device
    columns = [
        to_device(np.searchsorted(all_ids, np.asarray(active.features.ids)).astype(np.int64), device)
        for active in actives
    ]
    return GivenFeatures(groups, actives[0].dictionary.selection(ids), columns)


def _values(groups: Sequence[ReadGroup]) -> torch.Tensor:
    return torch.cat([group.buffers[0].squeeze(1) for group in groups])
