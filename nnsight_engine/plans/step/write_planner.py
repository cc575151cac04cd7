"""Plans the operations that write: instructions, and kernels for what these add."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import numpy as np
import torch

from nnsight_engine.plans.records import leaf_width
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step.condition_planner import Staged
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.feature_kernels import ChangedRows, bounded, changes_of
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.instructions import Code, Instructions, Word, Words
from nnsight_engine.plans.step.operation_rows import OperationRows, mean_rows, with_rows_alike
from nnsight_engine.plans.step.overflows import Overflows, Segment
from nnsight_engine.plans.step.plan import KernelGroup, StepPlan
from nnsight_engine.plans.step.programs import (
    NARROWED_KINDS,
    WITH_FACTORS,
    addresses,
    in_order,
    patch_bytes,
    reads,
)
from nnsight_engine.plans.step.stage import SiteKey
from nnsight_engine.plans.step.table import Block, Member, TableBuilder

_CHANGE: Final = Instructions.blank(1, Code.CHANGE)


class WritePlanner:
    def __init__(self, context: StepContext) -> None:
        self._context = context

    def plan(self, plan: StepPlan, work: list[OperationRows], staged: Staged, table: TableBuilder) -> None:
        groups: dict[Any, list[ChangedRows]] = defaultdict(list)
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
        key = several[0].key
        sizes = [len(one.rows) for one in several]
        # Zeros: what a kernel that raises has left is added.
        out = torch.zeros(sum(sizes), self._context.width(key), device=self._context.device)
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
        active = item.active
        for indices, keys in with_rows_alike(active.keys, self._context.stage):
            rows = item.rows_at(keys[0])
            if not len(rows):
                continue
            own = program.at(indices)
            columns: dict[Word, Words | int] = {}
            if active.op.kind in WITH_FACTORS:
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
        rows, gate, mask = item.rows_at(keys[0]), item.gate_at(keys[0]), item.mask_at(keys[0])
        if gate is not None:
            columns[Word.GATE] = table.address(gate[0]) + gate[1]
        elif mask is not None:
            columns[Word.GATE] = table.address(mask) + np.arange(len(rows))
        if overflows is not None:
            columns[Word.OVERFLOW] = table.address(overflows.at(keys[0])) + rows
        table.add(Block(item.member, keys, order, rows, program, columns))

    def _overflows(self, plan: StepPlan, work: list[OperationRows]) -> Overflows | None:
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
