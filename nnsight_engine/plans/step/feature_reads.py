"""Features of the values that a step has read: few products with a dictionary for all requests."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from nnsight_engine.features.dictionary import Dictionary, Selection
from nnsight_engine.plans.features import PlannedDictionary
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step.feature_kernels import bounded, union_of
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.plan import GroupedReads, ReadGroup

Parts = dict[int, list[torch.Tensor]]
"""The parts of the records of groups of reads, by the ``id`` of the group."""


def plan_feature_reads(reads: Sequence[ReadGroup]) -> list[GroupedReads]:
    tops: dict[PlannedDictionary, list[ReadGroup]] = defaultdict(list)
    given: dict[PlannedDictionary, list[ReadGroup]] = defaultdict(list)
    for group in reads:
        active = group.slices[0].active
        if active.op.kind is OperationKind.FEATURES:
            (tops if active.features.top_k else given)[active.features.dictionary].append(group)
    found: list[GroupedReads] = [_top_features(groups) for groups in tops.values()]
    for groups in given.values():
        parts = bounded(groups, lambda one: one.slices[0].active.features, lambda one: one.slices[-1].stop)
        found += map(_given_features, parts)
    return found


@dataclasses.dataclass(slots=True)
class TopFeatures:
    groups: list[ReadGroup]
    dictionary: Dictionary
    numbers: list[int]

    def read(self) -> Parts:
        with torch.inference_mode():
            ids, activations = self.dictionary.top(_values(self.groups), max(self.numbers))
        sizes = [len(group.buffers[0]) for group in self.groups]
        pieces = zip(ids.to(torch.int32).split(sizes), activations.split(sizes), strict=True)
        return {
            id(group): [own[:, :k], values[:, :k]]
            for group, k, (own, values) in zip(self.groups, self.numbers, pieces, strict=True)
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
