"""Batches operations on rows into a few kernels per site.

The stage keeps the order of one request's operations at one site: its first operation there
is in stage 0, the next in stage 1. Within a stage, operations of the same form over all
requests become one kernel; their rows are disjoint, since each request owns its rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.sites import PlannedSite
from nnsight_engine.plans.step import reads, writes
from nnsight_engine.plans.step.active import ActiveOp, ActiveRequest
from nnsight_engine.plans.step.feature_kernels import FeatureChanges, bounded, union_of
from nnsight_engine.plans.step.host_arena import to_device

RowArray = npt.NDArray[np.int64]
GroupKey = tuple[object, ...]


@dataclasses.dataclass(slots=True)
class KernelMember:
    """One operation of one request at one site in one step.

    Attributes:
        request: The request.
        active: The operation.
        site_index: Index of the site among the operation's sites.
        rows: Rows of the step's tensor at this site, ascending.
        patch_rows: PATCH: row of the values for each of ``rows``.
        source_rows: MEAN: rows to average, or None if this step does not have all of them.
        mask: Which of the rows are written, on the device; None for all.
        gate: The same where a condition decides, once it has been evaluated: a buffer of the step, and the
            rows' places in it. It includes the mask.
        read_site: The site, where it is not the operation itself that acts, but what it depends on is read.
        inputs: FEATURE: the values that its dictionary reads, ``[rows, width]``; None for those at the site.
        overflows: Flags of the site's rows, if what it adds may be beyond float16, see ``Overflows``.
    """

    request: ActiveRequest
    active: ActiveOp
    site_index: int
    rows: RowArray
    patch_rows: RowArray | None = None
    source_rows: RowArray | None = None
    mask: torch.Tensor | None = None
    gate: tuple[torch.Tensor, RowArray] | None = None
    read_site: PlannedSite | None = None
    inputs: torch.Tensor | None = None
    overflows: torch.Tensor | None = None

    @property
    def site(self) -> PlannedSite:
        """The site."""
        return self.active.op.sites[self.site_index] if self.read_site is None else self.read_site

    @property
    def writes(self) -> bool:
        """Whether the value at the site may change."""
        return self.read_site is None and not self.active.op.reads


def group_key(member: KernelMember) -> GroupKey:
    """Return the key shared by writing members that one kernel can serve."""
    return (member.mask is not None, member.gate is not None, *_form(member))


def bounded_members(members: list[KernelMember]) -> list[list[KernelMember]]:
    """Return the members that one kernel serves, and if it would be too large, several parts of them."""
    if members[0].active.op.kind is not OperationKind.FEATURE:
        return [members]
    return list(bounded(members, lambda one: one.active.features, lambda one: len(one.rows)))


def _form(member: KernelMember) -> GroupKey:
    op = member.active.op
    match op.kind:
        case OperationKind.ADD | OperationKind.NORM_MATCH | OperationKind.PROJECT:
            return (op.kind,)
        case OperationKind.SUBSPACE:
            return (op.kind, len(member.active.tensor_at(member.site_index)))
        case OperationKind.REPLACE | OperationKind.ZERO | OperationKind.PATCH:
            return (OperationKind.REPLACE, op.units)
        case OperationKind.FEATURE:
            features = member.active.features
            return (op.kind, features.dictionary, features.source)
        case _:
            return (op.kind, id(member.request), member.active.index)


class KernelFactory:
    """Builds the kernels of one step; index tensors and stacked vectors are shared between sites.

    Args:
        device: The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}
        self._spans: dict[tuple[int, ...], tuple[int, int] | None] = {}
        self._stacks: dict[tuple[tuple[int, int, int], ...], torch.Tensor] = {}
        self._builders: dict[OperationKind, Callable[[list[KernelMember]], writes.Kernel]] = {
            OperationKind.ADD: self._add,
            OperationKind.NORM_MATCH: self._norm_match,
            OperationKind.PROJECT: self._project,
            OperationKind.SUBSPACE: self._subspace,
            OperationKind.REPLACE: self._set,
            OperationKind.ZERO: self._set,
            OperationKind.PATCH: self._set,
            OperationKind.MEAN: self._set_mean,
            OperationKind.FEATURE: self._features,
        }

    def build(self, members: list[KernelMember]) -> writes.Kernel:
        """Return one kernel for writing members that share a group key."""
        kernel = self._builders[members[0].active.op.kind](members)
        gates = [member.gate for member in members if member.gate is not None]
        if gates:
            places = to_device(np.concatenate([own for _, own in gates]), self._device)
            overflows = members[0].overflows
            return writes.Gated(kernel, self.row_index(members), gates[0][0], places, overflows)
        masks = [member.mask for member in members if member.mask is not None]
        if masks:
            return writes.Masked(kernel, self.row_index(members), torch.cat(masks), members[0].overflows)
        return kernel

    def read(
        self, members: list[KernelMember], out: torch.Tensor, overflows: torch.Tensor | None = None
    ) -> writes.Kernel:
        """Return one kernel that writes the rows of all members, in order, into ``out``.

        ``out`` is ``[rows, width]``, or ``[rows]`` for probes; ``overflows`` is as in ``GatherKernel``.
        """
        index = self.row_index(members)
        if members[0].active.op.kind is OperationKind.PROBE:
            bias = [m.active.op.bias for m in members for _ in range(len(m.rows))]
            return reads.ProbeKernel(index, self._stack(members), self._column(bias).squeeze(1), out)
        if members[0].active.op.captures_states:
            return reads.GatherStates(index, out, overflows)
        return reads.GatherKernel(index, self._span(members), out, overflows)

    def row_index(self, members: list[KernelMember]) -> torch.Tensor:
        """Return the members' rows, concatenated, as an index tensor."""
        key = tuple(id(member.rows) for member in members)
        index = self._rows.get(key)
        if index is None:
            rows = np.concatenate([member.rows for member in members])
            index = self._rows[key] = to_device(rows, self._device)
        return index

    def _span(self, members: list[KernelMember]) -> tuple[int, int] | None:
        """Return the members' rows as ``(start, stop)`` if they are contiguous, else None."""
        key = tuple(id(member.rows) for member in members)
        if key not in self._spans:
            rows = [row for member in members for row in member.rows.tolist()]
            self._spans[key] = contiguous_span(rows)
        return self._spans[key]

    def _stack(self, members: list[KernelMember]) -> torch.Tensor:
        """Return each member's tensor repeated once per row, ``[rows, width]``.

        Members with one row each may have tensors of more axes.
        """
        key = tuple((id(m.active.tensor), _stack_index(m), len(m.rows)) for m in members)
        stack = self._stacks.get(key)
        if stack is None:
            vectors = [m.active.tensor_at(m.site_index) for m in members]
            if all(len(m.rows) == 1 for m in members):
                stack = torch.stack(vectors)
            else:
                stack = torch.cat([v.expand(len(m.rows), -1) for v, m in zip(vectors, members, strict=True)])
            self._stacks[key] = stack
        return stack

    def _add(self, members: list[KernelMember]) -> writes.Kernel:
        return writes.Add(self.row_index(members), self._span(members), self._stack(members))

    def _norm_match(self, members: list[KernelMember]) -> writes.Kernel:
        return writes.NormMatch(self.row_index(members), self._stack(members), members[0].overflows)

    def _project(self, members: list[KernelMember]) -> writes.Kernel:
        ops = [member.active.op for member in members for _ in member.rows]
        bounds = None
        if any(op.low is not None or op.high is not None for op in ops):
            bounds = (
                self._column([-math.inf if op.low is None else op.low for op in ops]),
                self._column([math.inf if op.high is None else op.high for op in ops]),
            )
        return writes.Project(
            self.row_index(members),
            self._stack(members),
            self._column([op.offset for op in ops]),
            self._column([op.scale for op in ops]),
            bounds,
            members[0].overflows,
        )

    def _subspace(self, members: list[KernelMember]) -> writes.Kernel:
        """Return a kernel with one matrix product for each basis of several rows, and one for all others."""
        by_basis: dict[tuple[int, int], list[KernelMember]] = defaultdict(list)
        for member in members:
            by_basis[id(member.active.tensor), _stack_index(member)].append(member)
        ordered: list[KernelMember] = []
        single: list[KernelMember] = []
        bases: list[tuple[int, torch.Tensor]] = []
        for sharing in by_basis.values():
            num_rows = sum(len(member.rows) for member in sharing)
            if num_rows == 1:
                single += sharing
            else:
                ordered += sharing
                bases.append((num_rows, sharing[0].active.tensor_at(sharing[0].site_index)))
        if single:
            ordered += single
            bases.append((len(single), self._stack(single)))
        removed = [member.active.op.scale for member in ordered for _ in member.rows]
        overflows = members[0].overflows
        return writes.Subspace(self.row_index(ordered), self._column(removed), bases, overflows)

    def _set(self, members: list[KernelMember]) -> writes.Kernel:
        values = torch.cat([self._values(member) for member in members])
        return writes.Set(self.row_index(members), values, members[0].active.units)

    def _values(self, member: KernelMember) -> torch.Tensor:
        tensor = member.active.tensor_at(member.site_index)
        if member.patch_rows is not None:
            return tensor[to_device(member.patch_rows, self._device)]
        return tensor.expand(len(member.rows), -1)

    def _set_mean(self, members: list[KernelMember]) -> writes.Kernel:
        (member,) = members
        source = member.source_rows
        return writes.SetMean(
            self.row_index(members),
            member.active.units,
            None if source is None else to_device(source, self._device),
            member.request.means,
            (member.active.index, member.site_index),
        )

    def _features(self, members: list[KernelMember]) -> writes.Kernel:
        planned = [member.active.features for member in members]
        ids = union_of(planned)
        num_rows = sum(len(member.rows) for member in members)
        gain, offset = np.ones((num_rows, len(ids)), np.float32), np.zeros((num_rows, len(ids)), np.float32)
        start, all_ids = 0, np.asarray(ids)
        for member, own in zip(members, planned, strict=True):
            columns = np.searchsorted(all_ids, np.asarray(own.ids))
            rows = slice(start, start + len(member.rows))
            gain[rows, columns], offset[rows, columns] = own.gains, own.offsets
            start = rows.stop
        inputs = [member.inputs for member in members if member.inputs is not None]
        return FeatureChanges(
            self.row_index(members),
            members[0].active.dictionary.selection(ids),
            to_device(gain, self._device),
            to_device(offset, self._device),
            inputs,
            members[0].overflows,
        )

    def _column(self, values: list[float]) -> torch.Tensor:
        return to_device(np.asarray(values, np.float32), self._device).unsqueeze(1)


def _stack_index(member: KernelMember) -> int:
    tensor = member.active.tensor
    return member.site_index if tensor is not None and len(tensor) > 1 else 0


def contiguous_span(rows: list[int]) -> tuple[int, int] | None:
    """Return ``(start, stop)`` if ``rows`` ascend without a gap, else None."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return rows[0], rows[0] + len(rows)
    return None
