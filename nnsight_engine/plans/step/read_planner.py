"""Plans the operations that read values, into one buffer for all that are read alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nnsight_engine.plans.records import leaf_width, may_overflow, width_classes
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step.condition_planner import Staged, detector_key
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.instructions import Word, Words
from nnsight_engine.plans.step.operation_rows import OperationRows, with_rows_alike
from nnsight_engine.plans.step.plan import KernelGroup, ReadGroup, ReadSlice, StepPlan
from nnsight_engine.plans.step.programs import addresses, in_order, reads
from nnsight_engine.plans.step.reads import GatherStates
from nnsight_engine.plans.step.stage import SiteKey
from nnsight_engine.plans.step.table import Block, TableBuilder


def read_key(item: OperationRows) -> Any:
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


class ReadPlanner:
    def __init__(self, context: StepContext) -> None:
        self._context = context

    def plan(self, plan: StepPlan, items: list[OperationRows], staged: Staged, table: TableBuilder) -> None:
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
            for places, held in with_rows_alike(keys, stage):
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
        """Add the instructions; ``columns`` are the sites' indices, and their places in the buffer."""
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
        rows = to_device(np.concatenate([item.rows for item in items]), self._context.device)
        for place, site in places:
            flags = None if overflows is None else overflows[:, site]
            kernel = GatherStates(rows, buffer[:, place], flags)
            group = KernelGroup(kernel, [item.member for item in items])
            staged[items[0].active.keys[site]].append((in_order(items[0].stages[site]), group))
