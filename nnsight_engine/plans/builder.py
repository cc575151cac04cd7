"""Builds the plan of a step from the row spans of its requests.

Stages keep the order of a request's operations at a site. Rows that a request has already
delivered are not read again, while writes apply to every row, so that KV rebuilt after a
preemption contains them. A steady decode step (one row per request, no dependence on token or
position) reuses the plan of the previous step unchanged.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

from nnsight_engine.core.dtypes import LARGEST
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensor_bytes import DTYPES
from nnsight_engine.plans.active import ActiveOp, ActiveRequest, SiteKey
from nnsight_engine.plans.groups import GroupKey, KernelFactory, KernelMember, RowArray, group_key
from nnsight_engine.plans.ledger import ByteLedger
from nnsight_engine.plans.patterns import FormOf, PatternPlanner
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, PlannedSite
from nnsight_engine.plans.step_plan import KernelGroup, ReadGroup, ReadSlice, Span, StepBytes, StepPlan
from nnsight_engine.plans.where import evaluate
from nnsight_engine.plans.writes import Kernel

LOGITS = PlannedSite("logits")
SAMPLES = PlannedSite("samples")


def width_classes(op: PlannedOp, spec: ModelSpec) -> list[list[int]]:
    """Return the indices of the op's sites, grouped by width in order of first appearance.

    One buffer holds the sites of one width; the API process splits results by the same rule.
    """
    if op.kind is OperationKind.PROBE:
        return [list(range(len(op.sites)))]
    classes: dict[int, list[int]] = {}
    for index, site in enumerate(op.sites):
        classes.setdefault(leaf_width(site, spec), []).append(index)
    return list(classes.values())


def may_overflow(op: PlannedOp, spec: ModelSpec) -> bool:
    """Return whether captured values may exceed the capture's dtype.

    Each row of such a capture comes with a flag per site that says whether it does.
    """
    if (
        op.kind is not OperationKind.CAPTURE
        or op.reduce == "mean"
        or op.captures_patterns
        or op.dtype not in LARGEST
    ):
        return False
    return LARGEST[op.dtype] < LARGEST[spec.dtype]


def leaf_width(site: PlannedSite, spec: ModelSpec) -> int:
    """Return the flattened width of a site's value; raise InterventionError if the model lacks the site."""
    leaf = spec.leaf(site.leaf)
    if leaf is None:
        raise InterventionError("unknown_point", f"the model has no point {site}")
    return leaf.width


@dataclasses.dataclass(slots=True)
class OperationRows:
    """The rows on which one operation acts in this step.

    Attributes:
        span: The request's rows in the step.
        active: The operation.
        offsets: Offsets of the rows in the span, ascending.
        stages: Stage of the operation at each of its sites.
        rows: The same rows as indices into the step's tensors.
        logits_rows: Those rows that need logits, as indices into the plan's ``logits_rows``.
        logits_offsets: Offsets in the span of ``logits_rows``.
    """

    span: Span
    active: ActiveOp
    offsets: RowArray
    stages: tuple[int, ...] = ()
    rows: RowArray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    logits_rows: RowArray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    logits_offsets: RowArray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))

    def rows_at(self, key: SiteKey) -> RowArray:
        """Return row indices into the site's tensor; at ``logits`` they index the plan's ``logits_rows``."""
        return self.logits_rows if key == LOGITS else self.rows

    def offsets_at(self, key: SiteKey) -> RowArray:
        """Return the offsets in the span that belong to ``rows_at``."""
        return self.logits_offsets if key == LOGITS else self.offsets


class StepBuilder:
    """Builds the step plans for one model.

    Args:
        spec: The model's description.
        dtype: The model's dtype, also that of captures without a dtype.
        device: The model's device.
        ledger: Counts captured bytes.
        form_of: Returns a layer's form of attention, for patterns.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        ledger: ByteLedger,
        form_of: FormOf,
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._ledger = ledger
        self._patterns = PatternPlanner(spec, dtype, device, ledger, form_of)
        self._last: StepPlan | None = None

    def forget(self) -> None:
        """Drop the cached plan, with its buffers and its references to requests."""
        self._last = None

    def plan(self, spans: list[Span]) -> StepPlan:
        """Return the plan of a step, reusing the last one if only the positions changed."""
        signature = _signature(spans)
        last = self._last
        if last is not None and signature is not None and last.signature == signature:
            last.begin_again()
            last.spans = {span.request.request_id: span for span in spans}
            for span in spans:
                self._reserve(span, last.reserved[span.request.request_id])
            return last
        plan = StepPlan({span.request.request_id: span for span in spans}, KernelFactory(self._device))
        self._last = None
        try:
            work = [rows for span in spans for rows in self._rows_of(span, plan)]
            self._number_logits_rows(plan, work)
            self._plan_writes_and_reads(plan, work)
        except BaseException:
            self.give_back(plan, kept=True)
            raise
        plan.signature = signature
        self._last = plan
        return plan

    def _rows_of(self, span: Span, plan: StepPlan) -> list[OperationRows]:
        if span.request.failure is not None:
            return []
        work: list[OperationRows] = []
        stages: dict[SiteKey, int] = defaultdict(int)
        reserved = StepBytes()
        patterns: list[tuple[ActiveOp, RowArray]] = []
        for active in span.request.ops:
            offsets = _named_offsets(span, active)
            if active.op.captures_patterns:
                # Planned even if no row is captured: the keys of every step must be stored.
                patterns.append((active, offsets))
                continue
            if not len(offsets):
                continue
            if active.keys[0] == SAMPLES:
                # Sampled ids exist only after the forward pass; no other point shares their operation.
                if offsets[-1] == span.num_rows - 1:
                    plan.samples.append((span.request, active))
                continue
            numbers = tuple(stages[key] for key in active.keys)
            for key in active.keys:
                stages[key] += 1
            work.append(OperationRows(span, active, offsets, numbers, offsets + span.row))
            self._count_read(reserved, active, len(offsets))
        new = self._new_reductions(span.request, work)
        is_planned = not patterns or self._patterns.plan(plan, span, patterns)
        if is_planned and self._reserve(span, reserved, sum(new.values())):
            span.request.reductions.update(new)
            plan.reserved[span.request.request_id] = reserved
            return work
        plan.reserved[span.request.request_id] = StepBytes()
        # Its writes go on: others may already share the keys and values of this very step.
        return [item for item in work if not item.active.op.reads]

    def _reserve(self, span: Span, reserved: StepBytes, once: int = 0) -> bool:
        """Count a step's bytes; over a limit the request fails and nothing is allocated for it.

        Args:
            span: The request.
            reserved: What every step like this one needs.
            once: What the request holds from this step on, however many follow.
        """
        try:
            self._ledger.reserve(span.request.request_id, reserved.kept + reserved.scratch + once)
        except InterventionError as error:
            span.request.fail(error.code, error.message)
            # Nothing was reserved, so nothing may be released later.
            reserved.kept = reserved.scratch = 0
            return False
        return True

    def give_back(self, plan: StepPlan, *, kept: bool = False) -> None:
        """Release the bytes needed only during the step; with ``kept`` (the step never ran) all of them."""
        for request_id, reserved in plan.reserved.items():
            self._ledger.give_back(request_id, reserved.scratch + (reserved.kept if kept else 0))

    def _count_read(self, reserved: StepBytes, active: ActiveOp, num_rows: int) -> None:
        op = active.op
        if LOGITS in active.keys:
            # The full logits rows, of which a probe keeps one number each.
            reserved.scratch += num_rows * self._spec.vocab_size * self._dtype.itemsize
        match op.kind:
            case OperationKind.CAPTURE:
                if op.reduce == "none":
                    reserved.kept += num_rows * self._row_bytes(op)
                else:
                    reserved.scratch += num_rows * self._row_bytes(op)
            case OperationKind.PROBE:
                reserved.kept += num_rows * len(op.sites) * torch.float32.itemsize
            case OperationKind.LENS:
                rows = num_rows * len(op.sites)
                reserved.scratch += rows * self._spec.hidden_size * self._dtype.itemsize
                reserved.kept += rows * 8 * (op.top_k + len(op.targets))
            case _:
                pass

    def _new_reductions(self, request: ActiveRequest, work: list[OperationRows]) -> dict[int, int]:
        """Return the bytes of the one row that each reduction holds, of those that begin in this step."""
        return {
            item.active.index: self._row_bytes(item.active.op)
            for item in work
            if item.active.op.kind is OperationKind.CAPTURE
            and item.active.op.reduce != "none"
            and item.active.index not in request.reductions
        }

    def _row_bytes(self, op: PlannedOp) -> int:
        """Return the bytes of one row of a capture, at all its sites."""
        width = sum(leaf_width(site, self._spec) for site in op.sites)
        return width * self._capture_dtype(op).itemsize

    def _capture_dtype(self, op: PlannedOp) -> torch.dtype:
        # A mean is summed in float32, whatever dtype it is returned in.
        if op.reduce == "mean":
            return torch.float32
        return DTYPES[op.dtype] if op.dtype else self._dtype

    def _number_logits_rows(self, plan: StepPlan, work: list[OperationRows]) -> None:
        """Determine which rows need logits, and map each operation's rows to indices among those.

        A write matters only where a token is sampled or where the same request reads, so that
        steering the logits of a long prompt does not compute all of them.
        """
        at_logits = [item for item in work if LOGITS in item.active.keys]
        if not at_logits:
            return
        needed: dict[str, list[RowArray]] = defaultdict(list)
        for item in at_logits:
            if item.active.op.reads:
                needed[item.span.request.request_id].append(item.rows)
            elif item.active.op.kind is OperationKind.MEAN and _has_whole_prompt(item.span):
                # A mean is taken over all named rows, including those where no token is sampled.
                needed[item.span.request.request_id].append(item.rows)
        for item in at_logits:
            wanted = [np.array([item.span.row + item.span.num_rows - 1], np.int64)]
            wanted += needed[item.span.request.request_id]
            kept = np.isin(item.rows, np.concatenate(wanted))
            item.logits_rows, item.logits_offsets = item.rows[kept], item.offsets[kept]
            plan.writes_logits |= not item.active.op.reads
        plan.logits_rows = np.unique(np.concatenate([item.logits_rows for item in at_logits]))
        for item in at_logits:
            item.logits_rows = np.searchsorted(plan.logits_rows, item.logits_rows).astype(np.int64)

    def _plan_writes_and_reads(self, plan: StepPlan, work: list[OperationRows]) -> None:
        slots: dict[SiteKey, dict[tuple[int, GroupKey], list[KernelMember]]] = defaultdict(
            lambda: defaultdict(list)
        )
        read_groups: dict[GroupKey, list[OperationRows]] = defaultdict(list)
        for item in work:
            if item.active.op.reads:
                read_groups[_read_key(item)].append(item)
                continue
            for site_index, key in enumerate(item.active.keys):
                member = _write_member(item, site_index, key)
                if len(member.rows):
                    slots[key][item.stages[site_index], group_key(member)].append(member)
        staged: dict[SiteKey, list[tuple[int, KernelGroup]]] = defaultdict(list)
        for key, groups in slots.items():
            for (stage, _), members in groups.items():
                rebuild = _write_rebuild(plan.factory)
                staged[key].append((stage, KernelGroup(plan.factory.build(members), members, rebuild)))
        for items in read_groups.values():
            self._plan_read(plan, items, staged)
        for key, entries in staged.items():
            entries.sort(key=lambda entry: entry[0])
            plan.groups[key] = [group for _, group in entries]

    def _plan_read(
        self, plan: StepPlan, items: list[OperationRows], staged: dict[SiteKey, list[tuple[int, KernelGroup]]]
    ) -> None:
        op = items[0].active.op
        num_rows = sum(len(item.offsets) for item in items)
        group = ReadGroup([], [])
        start = 0
        for item in items:
            stop = start + len(item.offsets)
            group.slices.append(ReadSlice(item.span.request, item.active, start, stop, item.offsets))
            start = stop
        overflows = None
        if may_overflow(op, self._spec):
            overflows = torch.empty(num_rows, len(op.sites), dtype=torch.bool, device=self._device)
        for indices in width_classes(op, self._spec):
            width = leaf_width(op.sites[indices[0]], self._spec)
            shape = (
                (num_rows, len(indices))
                if op.kind is OperationKind.PROBE
                else (num_rows, len(indices), width)
            )
            buffer = torch.empty(shape, dtype=self._buffer_dtype(op), device=self._device)
            group.buffers.append(buffer)
            for place, site_index in enumerate(indices):
                key = items[0].active.keys[site_index]
                members = [
                    KernelMember(item.span.request, item.active, site_index, item.rows_at(key))
                    for item in items
                ]
                overflow_column = None if overflows is None else overflows[:, site_index]
                rebuild = _read_rebuild(plan.factory, members, buffer[:, place], overflow_column)
                kernel = plan.factory.read(members, buffer[:, place], overflow_column)
                staged[key].append((items[0].stages[site_index], KernelGroup(kernel, members, rebuild)))
        if overflows is not None:
            group.buffers.append(overflows)
        plan.reads.append(group)

    def _buffer_dtype(self, op: PlannedOp) -> torch.dtype:
        if op.kind is OperationKind.PROBE:
            return torch.float32
        return self._capture_dtype(op) if op.kind is OperationKind.CAPTURE else self._dtype


def _named_offsets(span: Span, active: ActiveOp) -> RowArray:
    """Return the rows of the span on which the operation acts, as offsets from the span's first row."""
    plan = span.request.plan
    # Positions delivered before a preemption are not delivered again.
    first = max(span.start, span.request.end_position) if active.op.reads else span.start
    if first >= span.stop:
        return np.empty(0, np.int64)
    if active.constant is not None and first >= plan.prompt_len:
        named = np.full(span.stop - first, active.constant)
    else:
        positions = np.arange(first, span.stop, dtype=np.int64)
        token_ids = span.token_ids[first : span.stop].astype(np.int64)
        named = evaluate(active.op.where, positions, token_ids, plan.prompt_len)
    offsets: RowArray = np.flatnonzero(named) + (first - span.start)
    # A `last` reduction keeps the last named row only.
    return offsets[-1:] if active.op.reduce == "last" else offsets


def _signature(spans: list[Span]) -> tuple[object, ...] | None:
    """Return the key that identifies a steady decode step, or None if the step is not steady."""
    entries: list[object] = []
    for span in spans:
        request = span.request
        fresh = span.start >= request.plan.prompt_len and span.start >= request.end_position
        if not (request.steady and fresh and span.num_rows == 1 and request.failure is None):
            return None
        entries.append((request.request_id, span.row))
    return tuple(entries)


def _read_key(item: OperationRows) -> GroupKey:
    op = item.active.op
    if op.kind is OperationKind.LENS:
        return (op.kind, item.active.keys, item.stages, op.top_k, op.targets)
    if op.kind is OperationKind.PROBE:
        return (op.kind, item.active.keys, item.stages)
    # A run stores every step of an unreduced read and a single row of a reduced one.
    return (op.kind, item.active.keys, item.stages, op.dtype, op.reduce)


def _write_member(item: OperationRows, site_index: int, key: SiteKey) -> KernelMember:
    op = item.active.op
    member = KernelMember(item.span.request, item.active, site_index, item.rows_at(key))
    if op.kind is OperationKind.PATCH:
        absolute = item.offsets_at(key) + item.span.start
        positions = np.asarray(op.where.positions, np.int64)
        member.patch_rows = np.searchsorted(positions, absolute).astype(np.int64)
    if op.kind is OperationKind.MEAN:
        member.source_rows = _mean_rows(item, key)
    return member


def _mean_rows(item: OperationRows, key: SiteKey) -> RowArray | None:
    """Return the rows over which a mean is taken at a site, or None if this step lacks some of them."""
    if not _has_whole_prompt(item.span):
        return None
    # The span begins at position 0, so offsets are positions.
    rows: RowArray = item.rows_at(key)[item.offsets_at(key) < item.span.request.plan.prompt_len]
    return rows


def _has_whole_prompt(span: Span) -> bool:
    return span.start == 0 and span.stop >= span.request.plan.prompt_len


def _write_rebuild(factory: KernelFactory) -> Callable[[KernelMember], Kernel]:
    return lambda member: factory.build([member])


def _read_rebuild(
    factory: KernelFactory, members: list[KernelMember], out: torch.Tensor, overflows: torch.Tensor | None
) -> Callable[[KernelMember], Kernel]:
    starts: dict[int, int] = {}
    start = 0
    for member in members:
        starts[id(member)] = start
        start += len(member.rows)

    def rebuild(member: KernelMember) -> Kernel:
        own = slice(starts[id(member)], starts[id(member)] + len(member.rows))
        return factory.read([member], out[own], None if overflows is None else overflows[own])

    return rebuild
