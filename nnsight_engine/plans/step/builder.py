"""Builds the plan of a step from the row spans of its requests.

Stages keep the order of a request's operations at a site. Rows that a request has already delivered are not
read again, while writes apply to every row, so that KV rebuilt after a preemption contains them. A steady
decode step (one row per request, no dependence on token or position) reuses the previous plan unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.request_plan import MARKS, SAMPLES, OperationKind
from nnsight_engine.plans.step.active import ActiveOp, ActiveRequest
from nnsight_engine.plans.step.condition_planner import (
    ScoreRows,
    gate_key,
    plan_conditions,
    plan_scores,
    tests_of,
)
from nnsight_engine.plans.step.context import SiteKey, StepBytes, StepContext
from nnsight_engine.plans.step.feature_kernels import plan_feature_reads
from nnsight_engine.plans.step.graph_table import GraphTable
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.operation_rows import (
    OperationRows,
    PlanInProgress,
    named_offsets,
    number_logits_rows,
)
from nnsight_engine.plans.step.plan import PlannedSample, Span, StepPlan
from nnsight_engine.plans.step.planners import (
    PatternRows,
    plan_patterns,
    plan_reads,
    plan_writes,
    read_key,
)
from nnsight_engine.plans.step.table import RowArray, executor_of
from nnsight_engine.plans.step.token_masks import RowParts, TokenMasks


class StepBuilder:
    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._masks = TokenMasks(context.device)
        self._executor = executor_of(context.device, context.dtype)
        self._last_plan: StepPlan | None = None

    def graph_table(self, taps: Collection[int], num_taps: int, num_rows: int) -> GraphTable:
        context = self._context
        return GraphTable(taps, num_taps, num_rows, context.spec.hidden_size, context.device, self._executor)

    def forget(self) -> None:
        self._last_plan = None
        self._masks.forget()

    def plan(self, spans: list[Span]) -> StepPlan:
        """Return the plan of a step, reusing the last one if only the positions changed."""
        signature = _signature(spans)
        last = self._last_plan
        if last is not None and signature is not None and last.signature == signature:
            last.reset()
            last.spans = {span.request.request_id: span for span in spans}
            for span in spans:
                self._reserve(span, last.reserved[span.request.request_id], self._charge_accepted(span))
            return last
        by_id = {span.request.request_id: span for span in spans}
        plan = StepPlan(by_id)
        self._last_plan = None
        try:
            tests: list[ScoreRows] = []
            work = [rows for span in spans for rows in self._rows_of(span, plan, tests)]
            number_logits_rows(plan, work)
            self._plan_writes_and_reads(plan, work, tests)
        except BaseException:
            self.give_back(plan, kept=True)
            raise
        plan.signature = signature
        self._last_plan = plan
        return plan

    def plan_image(self, request: ActiveRequest, image: int) -> StepPlan:
        """Return the plan of a request's operations while the vision encoder runs for one image.

        Positions are the numbers of its rows among those of all images. A mean is taken over the named rows
        of the image. What was read before is not read again.
        """
        plan = StepPlan({})
        before, image_rows = request.plan.images[:image], request.plan.images[image]
        start = sum(earlier.num_rows for earlier in before)
        span = Span(request, 0, image_rows.num_rows, start, np.empty(0, np.int32))
        stages: dict[SiteKey, int] = defaultdict(int)
        reserved, work = StepBytes(), []
        for active in request.ops:
            op = active.op
            if not op.is_in_encoder or (op.reads and image in request.encoded):
                continue
            offsets = np.asarray(op.where.positions, np.int64) - start
            offsets = offsets[(offsets >= 0) & (offsets < image_rows.num_rows)]
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

    def _rows_of(self, span: Span, plan: StepPlan, tests: list[ScoreRows]) -> list[OperationRows]:
        """Return the rows of a request's operations, and add those of their tests to ``tests``.

        Bytes of its reads are reserved; over a limit it fails, and only its writes are returned.
        """
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
                tests += tests_of(span, active, offsets, stages)
                work += self._operation_rows(span, active, offsets, mask, stages)
        for item in work:
            # Rows of drafts are charged once they are accepted: limits are those of the results.
            num_certain = int(np.searchsorted(item.offsets, span.num_certain))
            self._context.count_rows(reserved, item.active.op, num_certain)
        new = self._new_reductions(span.request, work)
        is_planned = not patterns or plan_patterns(self._context, plan, span, patterns)
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
        """Return an operation's rows, if any; ``stages`` counts the request's work at each site so far."""
        rows = _rows_in_step(span, active, offsets) if len(offsets) else None
        if rows is None:
            return []
        gate_stage = source_stage = 0
        if active.source is not None:
            source_stage, stages[active.source] = stages[active.source], stages[active.source] + 1
        if active.tests:
            first = gate_key(active, self._context.spec)
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
        """Charge for accepted drafts of earlier steps; return bytes to reserve, negative if too many were.

        Positions below ``charged_position`` are charged; the caller charges those of this step's other rows.
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
        """Return which rows a rule names, ``[offsets]`` on the device: the host lacks their tokens."""
        if span.step_token_ids is None:
            raise RuntimeError("the step's tokens are known neither to the host nor on the device")
        token_ids = span.step_token_ids[to_device(offsets + span.row, self._context.device)]
        answer_parts = (
            None if parts is None or parts.rows is None else parts.rows[to_device(offsets, token_ids.device)]
        )
        return self._masks.mask(
            active.op.where, offsets + span.start, token_ids, span.request.plan.prompt_len, answer_parts
        )

    def _reserve(self, span: Span, reserved: StepBytes, once: int = 0) -> bool:
        """Count a step's bytes, and those that a repeated step does not need again (``once``).

        Over a limit the request fails and nothing is allocated for it.
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
        """Return the bytes of the results of reduced captures that have none yet, by operation."""
        return {
            item.active.index: self._context.row_bytes(item.active.op)
            for item in work
            if item.active.op.kind is OperationKind.CAPTURE
            and item.active.op.reduce != "none"
            and item.active.index not in request.reductions
        }

    def _plan_writes_and_reads(
        self, plan: StepPlan, items: list[OperationRows], tests: list[ScoreRows]
    ) -> None:
        """Put a step's work into its plan; gates come first, because writes refer to them."""
        work = PlanInProgress(self._context, plan)
        plan_conditions(work, tests, items)
        read_groups: dict[Any, list[OperationRows]] = defaultdict(list)
        for item in items:
            # Of an operation that only marks, its gate is all that is read.
            if item.active.op.reads and item.active.op.kind not in MARKS:
                read_groups[read_key(item)].append(item)
        plan_writes(work, [item for item in items if not item.active.op.reads])
        for group in read_groups.values():
            (plan_reads if group[0].active.score is None else plan_scores)(work, group)
        if self._context.stage.is_last:
            plan.computed = plan_feature_reads(plan.reads)
        work.finish(self._executor)


def _plan_samples(
    plan: StepPlan, span: Span, active: ActiveOp, offsets: RowArray, mask: torch.Tensor | None
) -> None:
    """Plan the capture of sampled ids, which exist only after the forward pass."""
    steps = offsets[offsets >= span.num_certain - 1] - (span.num_certain - 1)
    if len(steps):
        row = None if mask is None else plan.add_mask(mask[-1:])
        plan.samples.append(PlannedSample(span.request, active, row, tuple(steps.tolist())))


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
    """Return a span's rows as indices into the step's tensors; of states, into its requests.

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
    """Return the parts of the answer of a span's rows; None if no rule of the request names a part."""
    tracker = span.request.answer
    if tracker is None:
        return None
    ids = span.step_token_ids
    token_ids = None if ids is None else ids[span.row : span.row + span.num_rows]
    return tracker.rows(span.start, span.num_rows, span.token_ids, token_ids)


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
