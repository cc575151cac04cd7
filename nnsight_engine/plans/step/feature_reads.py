"""Features of the values that a step has read: one product with each dictionary for all requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from nnsight_engine.plans.features import PlannedDictionary
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step.feature_kernels import union_of
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.plan import ReadGroup


def feature_groups(reads: Iterable[ReadGroup]) -> list[list[ReadGroup]]:
    """Return the groups of reads that one application of a dictionary serves.

    Those that ask for its most active features are together, and those that ask for given ones.
    """
    found: dict[tuple[PlannedDictionary, bool], list[ReadGroup]] = defaultdict(list)
    for group in reads:
        active = group.slices[0].active
        if active.op.kind is OperationKind.FEATURES:
            found[active.features.dictionary, active.features.top_k > 0].append(group)
    return list(found.values())


def read_features(groups: Sequence[ReadGroup]) -> dict[int, list[torch.Tensor]]:
    """Return the parts of the records of such groups, by the ``id`` of the group."""
    x = torch.cat([group.buffers[0].squeeze(1) for group in groups])
    with torch.inference_mode():
        if groups[0].slices[0].active.features.top_k:
            return _most_active(groups, x)
        return _given(groups, x)


def _most_active(groups: Sequence[ReadGroup], x: torch.Tensor) -> dict[int, list[torch.Tensor]]:
    actives = [group.slices[0].active for group in groups]
    numbers = [active.features.top_k for active in actives]
    ids, activations = actives[0].dictionary.dictionary.top(x, max(numbers))
    sizes = [len(group.buffers[0]) for group in groups]
    pieces = zip(groups, numbers, ids.to(torch.int32).split(sizes), activations.split(sizes), strict=True)
    return {id(group): [own[:, :k], values[:, :k]] for group, k, own, values in pieces}


def _given(groups: Sequence[ReadGroup], x: torch.Tensor) -> dict[int, list[torch.Tensor]]:
    actives = [group.slices[0].active for group in groups]
    ids = union_of([active.features for active in actives])
    activations = actives[0].dictionary.selection(ids).activations(x)
    found = {}
    pieces = activations.split([len(group.buffers[0]) for group in groups])
    for group, active, values in zip(groups, actives, pieces, strict=True):
        columns = np.searchsorted(np.asarray(ids), np.asarray(active.features.ids)).astype(np.int64)
        found[id(group)] = [values.index_select(1, to_device(columns, values.device))]
    return found
