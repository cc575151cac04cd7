"""Kernels of the writes that are no instructions: means over the prompt, and changes of features."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step import writes
from nnsight_engine.plans.step.feature_kernels import FeatureChanges, bounded, union_of
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.table import Member, RowArray

GroupKey = tuple[object, ...]


@dataclasses.dataclass(slots=True)
class KernelMember:
    """One operation of one request at one site in one step.

    Attributes:
        member: The operation.
        site_index: Index of the site among the operation's sites.
        rows: Rows of the step's tensor at this site, ascending.
        source_rows: MEAN: rows to average, or None if this step does not have all of them.
        mask: Which of the rows are written, on the device; None for all.
        gate: The same where a condition decides: the gates of the step, and the rows' places among them.
        inputs: FEATURE: the values that its dictionary reads, ``[rows, width]``; None for those at the site.
        overflows: Flags of the site's rows, if what it adds may be beyond float16, see ``Overflows``.
    """

    member: Member
    site_index: int
    rows: RowArray
    source_rows: RowArray | None = None
    mask: torch.Tensor | None = None
    gate: tuple[torch.Tensor, RowArray] | None = None
    inputs: torch.Tensor | None = None
    overflows: torch.Tensor | None = None


def group_key(one: KernelMember) -> GroupKey:
    """Return the key shared by members that one kernel can serve."""
    active = one.member.active
    if active.op.kind is OperationKind.FEATURE:
        own: GroupKey = (active.features.dictionary, active.features.source)
    else:
        own = (id(one.member.request), active.index)
    return (active.op.kind, one.mask is not None, one.gate is not None, *own)


def bounded_members(members: list[KernelMember]) -> Iterator[list[KernelMember]]:
    """Yield the members that one kernel serves, and if it would be too large, several parts of them."""
    if members[0].member.active.op.kind is not OperationKind.FEATURE:
        yield members
        return
    yield from bounded(members, lambda one: one.member.active.features, lambda one: len(one.rows))


def kernel_of(members: list[KernelMember], device: torch.device) -> writes.Kernel:
    """Return one kernel for members that share a group key."""
    rows = to_device(np.concatenate([one.rows for one in members]), device)
    is_mean = members[0].member.active.op.kind is OperationKind.MEAN
    kernel = _set_mean(members[0], rows) if is_mean else _features(members, rows)
    gates = [one.gate for one in members if one.gate is not None]
    masks = [one.mask for one in members if one.mask is not None]
    if gates:
        places = to_device(np.concatenate([own for _, own in gates]), device)
        return writes.Masked(kernel, rows, gates[0][0], places, members[0].overflows)
    if masks:
        places = torch.arange(len(rows), device=device)
        return writes.Masked(kernel, rows, torch.cat(masks), places, members[0].overflows)
    return kernel


def _set_mean(one: KernelMember, rows: torch.Tensor) -> writes.Kernel:
    active, source = one.member.active, one.source_rows
    return writes.SetMean(
        rows,
        active.units,
        None if source is None else to_device(source, rows.device),
        one.member.request.means,
        (active.index, one.site_index),
    )


def _features(members: list[KernelMember], rows: torch.Tensor) -> writes.Kernel:
    planned = [one.member.active.features for one in members]
    ids = union_of(planned)
    gain, offset = np.ones((len(rows), len(ids)), np.float32), np.zeros((len(rows), len(ids)), np.float32)
    start, all_ids = 0, np.asarray(ids)
    for one, own in zip(members, planned, strict=True):
        columns = np.searchsorted(all_ids, np.asarray(own.ids))
        places = slice(start, start + len(one.rows))
        gain[places, columns], offset[places, columns] = own.gains, own.offsets
        start = places.stop
    return FeatureChanges(
        rows,
        members[0].member.active.dictionary.selection(ids),
        to_device(gain, rows.device),
        to_device(offset, rows.device),
        [one.inputs for one in members if one.inputs is not None],
        members[0].overflows,
    )
