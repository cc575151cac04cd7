"""Builds the plan of a step from the row spans of its requests.

Stages keep the order of a request's operations at a site. Rows that a request has already
delivered are not read again, while writes apply to every row, so that KV rebuilt after a
preemption contains them. A steady decode step (one row per request, no dependence on token or
position) reuses the plan of the previous step unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.records import leaf_width, may_overflow, width_classes
from nnsight_engine.plans.request_plan import MARKS, OperationKind
from nnsight_engine.plans.sites import LOGITS, SAMPLES
from nnsight_engine.plans.step.active import ActiveOp, ActiveRequest
from nnsight_engine.plans.step.answer_tracker import RowParts
from nnsight_engine.plans.step.condition_planner import (
    ConditionPlanner,
    DetectorRows,
    Staged,
    detector_key,
)
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.feature_kernels import ChangedRows, bounded, changes_of
from nnsight_engine.plans.step.feature_reads import plan_feature_reads
from nnsight_engine.plans.step.graph_table import GraphTable
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.instructions import Code, Instructions, Word, Words
from nnsight_engine.plans.step.ledger import StepBytes
from nnsight_engine.plans.step.operation_rows import (
    OperationRows,
    mean_rows,
    named_offsets,
    number_logits_rows,
)
from nnsight_engine.plans.step.overflows import Overflows, Segment
from nnsight_engine.plans.step.pattern_planner import PatternPlanner, PatternRows
from nnsight_engine.plans.step.plan import KernelGroup, PlannedSample, ReadGroup, ReadSlice, Span, StepPlan
from nnsight_engine.plans.step.programs import NARROWED_KINDS, addresses, in_order, patch_bytes, reads
from nnsight_engine.plans.step.reads import GatherStates
from nnsight_engine.plans.step.stage import SiteKey, Stage
from nnsight_engine.plans.step.table import Block, Member, RowArray, TableBuilder, executor_of
from nnsight_engine.plans.step.token_masks import TokenMasks

GroupKey = tuple[Any, ...]
_CHANGE: Final = Instructions.blank(1, Code.CHANGE)


class StepBuilder:
    """Builds the step plans for one model.

    Args:
        context: The model, and the count of captured bytes.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._patterns = PatternPlanner(context)
        self._conditions = ConditionPlanner(context)
        self._masks = TokenMasks(context.device)
        self._executor = executor_of(context.device, context.dtype)
        self._last: StepPlan | None = None

    def graph_table(self, taps: Collection[int], num_rows: int) -> GraphTable:
        """Return a table for graphs with the work of some taps."""
        context = self._context
        return GraphTable(taps, num_rows, context.spec.hidden_size, context.device, self._executor)

    def forget(self) -> None:
        """Drop the cached plan, with its buffers and its references to requests."""
        self._last = None
        self._masks.forget()

    def plan(self, spans: list[Span]) -> StepPlan:
        """Return the plan of a step, reusing the last one if only the positions changed."""
        signature = _signature(spans)
        last = self._last
        if last is not None and signature is not None and last.signature == signature:
            last.reset()
            last.spans = {span.request.request_id: span for span in spans}
            for span in spans:
                self._reserve(span, last.reserved[span.request.request_id], self._charge_accepted(span))
            return last
        by_id = {span.request.request_id: span for span in spans}
        plan = StepPlan(by_id)
        self._last = None
        try:
            tests: list[DetectorRows] = []
            work = [rows for span in spans for rows in self._rows_of(span, plan, tests)]
            number_logits_rows(plan, work)
            self._plan_writes_and_reads(plan, work, tests)
        except BaseException:
            self.give_back(plan, kept=True)
            raise
        plan.signature = signature
        self._last = plan
        return plan

    def plan_image(self, request: ActiveRequest, image: int) -> StepPlan:
        """Return the plan of what a request's operations do while the vision encoder runs for one image.

        Its rows are those of the image, and its positions their numbers among those of all images. A mean is
        taken over the named rows of the image. What was read before is not read again.
        """
        plan = StepPlan({})
        before, own = request.plan.images[:image], request.plan.images[image]
        start = sum(one.num_rows for one in before)
        span = Span(request, 0, own.num_rows, start, np.empty(0, np.int32))
        stages: dict[SiteKey, int] = defaultdict(int)
        reserved, work = StepBytes(), []
        for active in request.ops:
            op = active.op
            if not op.is_in_encoder or (op.reads and image in request.encoded):
                continue
            offsets = np.asarray(op.where.positions, np.int64) - start
            offsets = offsets[(offsets >= 0) & (offsets < own.num_rows)]
            if op.reduce == "last":
                offsets = offsets[-1:]
            if not len(offsets):
                continue
            numbers = tuple(stages[key] for key in active.keys)
            for key, site_index in zip(active.keys, range(len(op.sites)), strict=True):
                stages[key] += 1
                request.means.pop((active.index, site_index), None)  # that of another image
            work.append(OperationRows(span, active, offsets, numbers, offsets))
            self._context.count_rows(reserved, op, len(offsets))
        new = self._new_reductions(request, work)
        if self._reserve(span, reserved, sum(new.values())):
            request.reductions.update(new)
            plan.reserved[request.request_id] = reserved
        else:
            work = [item for item in work if not item.active.op.reads]
        self._plan_writes_and_reads(plan, work, [])
        for group in plan.reads:
            for piece in group.slices:
                piece.first = start
        request.encoded.add(image)
        return plan

    def _rows_of(self, span: Span, plan: StepPlan, tests: list[DetectorRows]) -> list[OperationRows]:
        """Return the rows of a request's operations, and add those of the tests of their conditions."""
        _check_encoded(span)
        if span.request.failure is not None:
            return []
        work: list[OperationRows] = []
        stages: dict[SiteKey, int] = defaultdict(int)
        reserved = StepBytes()
        patterns: list[PatternRows] = []
        parts = _parts_of(span)
        for active in span.request.ops:
            if active.op.is_in_encoder:
                continue
            offsets, is_masked = named_offsets(span, active, parts)
            mask = self._mask(span, active, offsets, parts) if is_masked else None
            if active.op.captures_patterns:
                # Planned even if no row is captured: the keys of every step must be stored.
                patterns.append(PatternRows(active, offsets, mask))
            elif active.keys[0] == SAMPLES:
                _plan_samples(plan, span, active, offsets, mask)
            else:
                tests += self._conditions.tests_of(span, active, offsets, stages)
                work += self._operation_rows(span, active, offsets, mask, stages)
        for item in work:
            # Rows of drafts are charged once they are accepted: limits are those of the results.
            num_certain = int(np.searchsorted(item.offsets, span.num_certain))
            self._context.count_rows(reserved, item.active.op, num_certain)
        new = self._new_reductions(span.request, work)
        is_planned = not patterns or self._patterns.plan(plan, span, patterns)
        once = sum(new.values()) + self._charge_accepted(span)
        if is_planned and self._reserve(span, reserved, once):
            span.request.reductions.update(new)
            plan.reserved[span.request.request_id] = reserved
            return work
        plan.reserved[span.request.request_id] = StepBytes()
        # Its writes go on: others may already share the keys and values of this very step.
        return [item for item in work if not item.active.op.reads]

    def _operation_rows(
        self,
        span: Span,
        active: ActiveOp,
        offsets: RowArray,
        mask: torch.Tensor | None,
        stages: dict[SiteKey, int],
    ) -> list[OperationRows]:
        """Return an operation with its rows and stages; none if it has no rows."""
        rows = _rows_in_step(span, active, offsets) if len(offsets) else None
        if rows is None:
            return []
        gate_stage = source_stage = 0
        if active.source is not None:
            source_stage, stages[active.source] = stages[active.source], stages[active.source] + 1
        if active.tests:
            first = self._conditions.gate_key(active)
            gate_stage, stages[first] = stages[first], stages[first] + 1
        numbers = tuple(stages[key] for key in active.keys)
        for key in active.keys:
            stages[key] += 1
        return [
            OperationRows(
                span, active, offsets, numbers, rows, mask, gate_stage=gate_stage, source_stage=source_stage
            )
        ]

    def _charge_accepted(self, span: Span) -> int:
        """Charge for rows that were drafts when they were computed; return the bytes to reserve for them.

        The number is negative if more rows were charged than have been accepted. The step's own rows are
        counted apart from these, see ``_rows_of``.
        """
        request = span.request
        certain = span.start + span.num_certain
        if certain <= request.plan.prompt_len:
            return 0
        if not request.has_drafts:
            request.charged_position = max(request.charged_position, certain)
            return 0
        num_own = max(0, certain - max(span.start, request.end_position, request.plan.prompt_len))
        # Drafts that are not judged yet may be refused.
        until = certain - (request.num_drafts if self._context.is_asynchronous else 0)
        if span.num_certain > 1:
            # Rows of a prompt, perhaps computed again: what came after them stays charged.
            until = max(certain, request.charged_position)
        num_accepted = until - request.charged_position - num_own
        request.charged_position = until
        if not num_accepted:
            return 0
        accepted = StepBytes()
        for active in request.ops:
            if active.constant is not False and active.op.reads and active.keys[0] != SAMPLES:
                self._context.count_rows(accepted, active.op, 1)
        return num_accepted * accepted.kept

    def _mask(self, span: Span, active: ActiveOp, offsets: RowArray, parts: RowParts | None) -> torch.Tensor:
        """Return which rows of a span an operation's rule names."""
        if span.step_token_ids is None:
            raise RuntimeError("the step's tokens are known neither to the host nor on the device")
        token_ids = span.step_token_ids[to_device(offsets + span.row, self._context.device)]
        own = (
            None if parts is None or parts.rows is None else parts.rows[to_device(offsets, token_ids.device)]
        )
        return self._masks.mask(
            active.op.where, offsets + span.start, token_ids, span.request.plan.prompt_len, own
        )

    def _reserve(self, span: Span, reserved: StepBytes, once: int = 0) -> bool:
        """Count a step's bytes; over a limit the request fails and nothing is allocated for it.

        Args:
            span: The request.
            reserved: What every step like this one needs.
            once: What the request holds from this step on, however many follow.
        """
        try:
            self._context.ledger.reserve(span.request.request_id, reserved.kept + reserved.scratch + once)
        except InterventionError as error:
            span.request.fail(error.code, error.message)
            # Nothing was reserved, so nothing may be released later.
            reserved.kept = reserved.scratch = 0
            return False
        return True

    def give_back(self, plan: StepPlan, *, kept: bool = False) -> None:
        """Release the bytes needed only during the step; with ``kept`` (the step never ran) all of them."""
        for request_id, reserved in plan.reserved.items():
            self._context.ledger.give_back(request_id, reserved.scratch + (reserved.kept if kept else 0))

    def _new_reductions(self, request: ActiveRequest, work: list[OperationRows]) -> dict[int, int]:
        """Return the bytes of the one row that each reduction holds, of those that begin in this step."""
        return {
            item.active.index: self._context.row_bytes(item.active.op)
            for item in work
            if item.active.op.kind is OperationKind.CAPTURE
            and item.active.op.reduce != "none"
            and item.active.index not in request.reductions
        }

    def _plan_writes_and_reads(
        self, plan: StepPlan, work: list[OperationRows], tests: list[DetectorRows]
    ) -> None:
        staged: Staged = defaultdict(list)
        table = TableBuilder()
        self._conditions.plan_conditions(plan, tests, work, staged, table)
        read_groups: dict[GroupKey, list[OperationRows]] = defaultdict(list)
        for item in work:
            # Of an operation that only marks, its gate is all that is read.
            if item.active.op.reads and item.active.op.kind not in MARKS:
                read_groups[_read_key(item)].append(item)
        self._plan_writes(plan, [item for item in work if not item.active.op.reads], staged, table)
        for items in read_groups.values():
            if items[0].active.detector is not None:
                self._conditions.plan_scores(plan, items, staged, table)
            else:
                self._plan_read(plan, items, staged, table)
        if self._context.stage.is_last:
            plan.computed = plan_feature_reads(plan.reads)
        plan.held = table.held
        others = {key: sorted(order for order, _ in entries) for key, entries in staged.items()}
        for key, segments in table.segments(
            others, self._executor, self._context.device, self._width
        ).items():
            staged[key] += segments
        for key, entries in staged.items():
            entries.sort(key=lambda entry: entry[0])
            plan.groups[key] = [group for _, group in entries]

    def _width(self, key: SiteKey) -> int:
        spec = self._context.spec
        return spec.hidden_size if isinstance(key, int) else leaf_width(key, spec)

    def _plan_writes(
        self, plan: StepPlan, work: list[OperationRows], staged: Staged, table: TableBuilder
    ) -> None:
        groups: dict[GroupKey, list[ChangedRows]] = defaultdict(list)
        overflows = self._overflows(plan, work)
        for item in work:
            active, kind = item.active, item.active.op.kind
            if active.program is not None:
                self._add_writes(table, item, active.program, overflows if kind in NARROWED_KINDS else None)
            elif kind is OperationKind.MEAN:
                self._plan_mean(plan, item, table)
            else:
                for index, key in enumerate(active.keys):
                    if self._context.stage.has(key) and len(item.rows_at(key)):
                        inputs = None if active.source is None else self._plan_source(item, table)
                        form = (active.features.dictionary, active.features.source)
                        one = ChangedRows(item, key, inputs)
                        groups[(key, item.stages[index], *form)].append(one)
        for (_, stage, *_), several in groups.items():
            for part in bounded(several, lambda one: one.features, lambda one: len(one.rows)):
                self._plan_changes(part, stage, staged, table, overflows)

    def _plan_changes(
        self,
        several: list[ChangedRows],
        stage: int,
        staged: Staged,
        table: TableBuilder,
        overflows: Overflows | None,
    ) -> None:
        """Plan changes of features: a kernel computes them, and instructions add them."""
        key = several[0].key
        sizes = [len(one.rows) for one in several]
        # Zeros: what a kernel that raises has left is added.
        out = torch.zeros(sum(sizes), self._width(key), device=self._context.device)
        pieces = list(out.split(sizes))
        kernel = changes_of(several, out)
        members = [one.item.member for one in several]
        group = KernelGroup(kernel, members, lambda one: changes_of(several[one : one + 1], pieces[one]))
        staged[key].append((in_order(stage), group))
        for one, piece in zip(several, pieces, strict=True):
            table.address(piece)
            columns: dict[Word, Words | int] = {Word.OPERAND: addresses(piece.unsqueeze(1), [0])}
            order = [in_order(stage, is_last_part=True)]
            self._add_write(table, one.item, [key], order, _CHANGE, columns, overflows)

    def _plan_mean(self, plan: StepPlan, item: OperationRows, table: TableBuilder) -> None:
        """Plan to set rows to a mean over the prompt, which the step takes that has all of it."""
        active, request = item.active, item.span.request
        program = Instructions.blank(len(active.keys), Code.SET)
        if active.units is not None:
            program.words[:, Word.UNITS] = active.units.data_ptr()
            program.words[:, Word.COUNT] = len(active.units)
        for index, key in enumerate(active.keys):
            if not (self._context.stage.has(key) and len(item.rows_at(key))):
                continue
            place = (active.index, index)
            mean = request.means.get(place)
            if mean is None:
                source = item.rows if active.op.is_in_encoder else mean_rows(item, key)
                if source is None:
                    request.fail(
                        "prompt_was_chunked",
                        "mean ablation needs the whole prompt in one step, and this engine splits it, by "
                        "--long-prefill-token-threshold or for a draft model's rows; raise "
                        "--max-num-batched-tokens",
                    )
                    return
                mean = torch.empty(active.widths[index], device=self._context.device)
                plan.means.append((request, place, mean))
                own = Instructions.blank(1, Code.MEAN)
                own.words[0, Word.UNITS] = table.address(to_device(source, mean.device))
                own.words[0, Word.COUNT], own.words[0, Word.OUT] = len(source), table.address(mean)
                order = in_order(item.stages[index])
                table.add(Block(item.member, [key], [order], item.rows_at(key)[-1:], own, {}))
                table.wait(key, order)
            program.words[index, Word.OPERAND] = table.address(mean)
        self._add_writes(table, item, program, None, is_last_part=True)

    def _add_writes(
        self,
        table: TableBuilder,
        item: OperationRows,
        program: Instructions,
        overflows: Overflows | None,
        *,
        is_last_part: bool = False,
    ) -> None:
        """Add the instructions of an operation that writes, given the one at each site."""
        active = item.active
        for indices, keys in _with_rows_alike(active.keys, self._context.stage):
            rows = item.rows_at(keys[0])
            if not len(rows):
                continue
            own = program.at(indices)
            columns: dict[Word, Words | int] = {}
            if active.op.kind in NARROWED_KINDS:
                # Sites follow each other, so all of them may use the same.
                count = max(1, int(own.words[0, Word.COUNT]))
                factors = torch.empty(len(rows), count, device=self._context.device)
                columns[Word.OUT] = table.address(factors) + np.arange(len(rows)) * count * factors.itemsize
            if active.op.kind is OperationKind.PATCH:
                positions = np.searchsorted(
                    np.asarray(active.op.where.positions, np.int64),
                    item.offsets_at(keys[0]) + item.span.start,
                )
                columns[Word.OPERAND] = own.words[:, Word.OPERAND, None] + positions * patch_bytes(active)
            order = [in_order(item.stages[index], is_last_part=is_last_part) for index in indices]
            self._add_write(table, item, keys, order, own, columns, overflows)

    @staticmethod
    def _add_write(
        table: TableBuilder,
        item: OperationRows,
        keys: list[SiteKey],
        order: list[int],
        program: Instructions,
        columns: dict[Word, Words | int],
        overflows: Overflows | None,
    ) -> None:
        """Add instructions that write at sites where the rows are alike, with the rows' gates and flags."""
        rows, gate, mask = item.rows_at(keys[0]), item.gate_at(keys[0]), item.mask_at(keys[0])
        if gate is not None:
            columns[Word.GATE] = table.address(gate[0]) + gate[1]
        elif mask is not None:
            columns[Word.GATE] = table.address(mask) + np.arange(len(rows))
        if overflows is not None:
            columns[Word.OVERFLOW] = table.address(overflows.at(keys[0])) + rows
        table.add(Block(item.member, keys, order, rows, program, columns))

    def _overflows(self, plan: StepPlan, work: list[OperationRows]) -> Overflows | None:
        """Add the flags of the step's rows to the plan and return them; None if no change can overflow."""
        items = [item for item in work if item.active.op.kind in NARROWED_KINDS]
        if self._context.dtype is not torch.float16 or not items:
            return None
        spans = {id(item.span): item.span for item in items}.values()
        segments = [Segment(span.request.request_id, span.row, span.row + span.num_rows) for span in spans]
        overflows = Overflows.of(segments, plan.logits_rows, self._context.device)
        plan.overflows.append(overflows)
        return overflows

    def _plan_source(self, item: OperationRows, table: TableBuilder) -> torch.Tensor:
        """Plan the read of the values on which a write elsewhere depends; return them, ``[rows, width]``."""
        source, key = item.active.features.source, item.active.source
        if source is None or key is None:
            raise RuntimeError("the operation reads where it writes")
        width = leaf_width(source, self._context.spec)
        values = torch.empty(len(item.rows), width, device=self._context.device)
        table.address(values)
        to = {Word.OUT: addresses(values.unsqueeze(1), [0])}
        member, order = Member(item.span.request, item.active), [in_order(item.source_stage)]
        table.add(Block(member, [key], order, item.rows, reads(values.dtype, 1), to))
        return values

    def _plan_read(
        self, plan: StepPlan, items: list[OperationRows], staged: Staged, table: TableBuilder
    ) -> None:
        op, stage = items[0].active.op, self._context.stage
        if not (stage.is_last or any(map(stage.has, items[0].active.keys))):
            return
        num_rows = sum(len(item.offsets) for item in items)
        masks = [item.mask for item in items if item.mask is not None]
        group = ReadGroup([], [], plan.add_mask(torch.cat(masks)) if masks else None)
        start = 0
        for item in items:
            stop = start + len(item.offsets)
            group.slices.append(ReadSlice(item.span.request, item.active, start, stop, item.offsets))
            start = stop
        overflows = None
        if may_overflow(op, self._context.spec):
            overflows = torch.empty(num_rows, len(op.sites), dtype=torch.bool, device=self._context.device)
        for indices in width_classes(op, self._context.spec):
            width = leaf_width(op.sites[indices[0]], self._context.spec)
            shape = (
                (num_rows, len(indices))
                if op.kind is OperationKind.PROBE
                else (num_rows, len(indices), width)
            )
            buffer = torch.empty(shape, dtype=self._context.buffer_dtype(op), device=self._context.device)
            group.buffers.append(buffer)
            keys = [items[0].active.keys[index] for index in indices]
            # An earlier stage sends the values of its own sites.
            for places, held in _with_rows_alike(keys, stage):
                sites = [indices[place] for place in places]
                if op.captures_states:
                    self._read_states(items, list(zip(places, sites, strict=True)), buffer, overflows, staged)
                else:
                    self._add_reads(table, group, items, held, (sites, places), buffer, overflows)
        if overflows is not None:
            group.buffers.append(overflows)
        plan.reads.append(group)

    @staticmethod
    def _add_reads(
        table: TableBuilder,
        group: ReadGroup,
        items: list[OperationRows],
        keys: list[SiteKey],
        columns: tuple[list[int], list[int]],
        buffer: torch.Tensor,
        overflows: torch.Tensor | None,
    ) -> None:
        """Add the instructions that read into a buffer.

        Args:
            table: The step's instructions.
            group: The reads.
            items: Their operations.
            keys: The sites' keys.
            columns: The sites' indices, and their places in the buffer.
            buffer: ``[rows, places, …]``.
            overflows: ``[rows, sites]``; None if no number can be beyond the buffer's dtype.
        """
        sites, places = columns
        order = [in_order(items[0].stages[site]) for site in sites]
        table.address(buffer)
        to = addresses(buffer, places)
        flags = None
        if overflows is not None:
            table.address(overflows)
            flags = addresses(overflows, sites)
        own = reads(buffer.dtype, len(sites))
        for item, piece in zip(items, group.slices, strict=True):
            part = slice(piece.start, piece.stop)
            words: dict[Word, Words | int] = {Word.OUT: to[:, part]}
            if flags is not None:
                words[Word.OVERFLOW] = flags[:, part]
            # Of a probe, the vector is its own.
            program = item.active.program
            instructions = own if program is None else program.at(sites)
            table.add(Block(item.member, keys, order, item.rows_at(keys[0]), instructions, words))

    def _read_states(
        self,
        items: list[OperationRows],
        places: list[tuple[int, int]],
        buffer: torch.Tensor,
        overflows: torch.Tensor | None,
        staged: Staged,
    ) -> None:
        """Plan the reads of recurrent states, given pairs of a place in the buffer and a site's index."""
        rows = to_device(np.concatenate([item.rows for item in items]), self._context.device)
        for place, site in places:
            flags = None if overflows is None else overflows[:, site]
            kernel = GatherStates(rows, buffer[:, place], flags)
            group = KernelGroup(kernel, [item.member for item in items])
            staged[items[0].active.keys[site]].append((in_order(items[0].stages[site]), group))


def _plan_samples(
    plan: StepPlan, span: Span, active: ActiveOp, offsets: RowArray, mask: torch.Tensor | None
) -> None:
    """Plan the capture of sampled ids, which exist only after the forward pass.

    No other point shares their operation.
    """
    steps = offsets[offsets >= span.num_certain - 1] - (span.num_certain - 1)
    if len(steps):
        own = None if mask is None else plan.add_mask(mask[-1:])
        plan.samples.append(PlannedSample(span.request, active, own, tuple(steps.tolist())))


def _check_encoded(span: Span) -> None:
    """Fail a request of whose images one enters the step without having been encoded with its operations."""
    for number, image in enumerate(span.request.plan.images):
        enters = any(start < span.stop and span.start < stop for start, stop in image.spans)
        if enters and number not in span.request.encoded:
            span.request.fail(
                "intervention_failed",
                f"image {number} was not encoded with this request's operations, so the answer is not what "
                "was asked for; this is a defect of the server, please report it",
            )


def _rows_in_step(span: Span, active: ActiveOp, offsets: RowArray) -> RowArray | None:
    """Return the rows of a span as indices into the step's tensors; of states, into its requests.

    A request that would capture states which the step does not keep fails, with None. Admission refuses them.
    """
    if not active.op.captures_states:
        return offsets + span.row
    if offsets.tolist() == [span.num_rows - 1]:
        return np.array([span.index], np.int64)
    positions = ", ".join(str(span.start + offset) for offset in offsets.tolist())
    span.request.fail(
        "intervention_failed",
        f"a step keeps recurrent states after its last position only, {span.stop - 1}, and those after "
        f"{positions} were to be captured",
    )
    return None


def _parts_of(span: Span) -> RowParts | None:
    """Return the parts of the answer to which the span's rows belong; None if no operation names one."""
    tracker = span.request.answer
    if tracker is None:
        return None
    ids = span.step_token_ids
    own = None if ids is None else ids[span.row : span.row + span.num_rows]
    return tracker.rows(span.start, span.num_rows, span.token_ids, own)


def _signature(spans: list[Span]) -> tuple[object, ...] | None:
    """Return the key that identifies a steady decode step, or None if the step is not steady."""
    entries: list[object] = []
    for span in spans:
        request = span.request
        fresh = span.start >= request.plan.prompt_len and span.start >= request.end_position
        if not (request.steady and fresh and span.num_rows == 1 and request.failure is None):
            return None
        entries.append((request.request_id, span.row, span.index))
    return tuple(entries)


def _read_key(item: OperationRows) -> GroupKey:
    op = item.active.op
    form = (op.kind, item.mask is not None, item.active.keys, item.stages)
    if op.kind is OperationKind.FEATURES:
        return (*form, op.features)
    if op.kind is OperationKind.LENS:
        return (*form, op.top_k, op.targets)
    if op.kind is OperationKind.PROBE:
        return form
    if item.active.detector is not None:
        return (*form, *detector_key(item.active.detector))
    # A run stores every step of an unreduced read and a single row of a reduced one.
    return (*form, op.dtype, op.reduce)


def _with_rows_alike(keys: Sequence[SiteKey], stage: Stage) -> list[tuple[list[int], list[SiteKey]]]:
    """Divide the sites of a stage into those at which an operation's rows have the same numbers.

    Each part is the places among all sites, and the keys.
    """
    held = [place for place, key in enumerate(keys) if stage.has(key)]
    at_logits = [place for place in held if keys[place] == LOGITS]
    others = [place for place in held if place not in at_logits] if at_logits else held
    return [(own, [keys[place] for place in own]) for own in (at_logits, others) if own]
