"""Results of a step's operations on the earlier stages of a pipeline, which the last stage collects.

All stages make the same plan of a step. A request that has failed on the last stage may still be planned on
an earlier one, until the scheduler has ended it; so values are assigned by request and operation, not place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.work_context import EAGER
from nnsight_engine.plans.records import Failure, width_classes
from nnsight_engine.plans.step.active import ActiveOp, ActiveRequest
from nnsight_engine.plans.step.context import Stage
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.plan import FlaggedRows, Overflows, ReadGroup, StepPlan

Rows = tuple[str, int, int]
"""A request's id, the index of one of its operations, and the number of rows that it reads."""
Unfilled = dict[tuple[str, int], ActiveRequest]
"""The operations, by request and index, of which an earlier stage has sent no values yet."""


class GroupRows(NamedTuple):
    rows: tuple[Rows, ...]
    num_tensors: int


@dataclasses.dataclass(slots=True)
class StageResults:
    """The results of one earlier stage.

    ``tensors`` are, of its sites, ``[rows, sites, …]`` for each buffer of each group that has some, then
    ``[sites, rows, heads, keys]`` for each capture of patterns, then flags.
    """

    stage: Stage
    request_ids: frozenset[str] = frozenset()
    failures: dict[str, Failure] = dataclasses.field(default_factory=dict)
    reads: list[GroupRows] = dataclasses.field(default_factory=list)
    patterns: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    overflows: list[list[FlaggedRows]] = dataclasses.field(default_factory=list)
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    is_uncompiled: bool = False
    spent_s: float = 0.0


def results_of_stage(plan: StepPlan, stage: Stage, spec: ModelSpec) -> StageResults:
    """Return what an earlier stage sends to the last one after its step, of its own sites."""
    plan.fail_unreached()
    requests = [span.request for span in plan.spans.values()]
    results = StageResults(
        stage,
        frozenset(plan.spans),
        {request.request_id: request.failure for request in requests if request.failure is not None},
        is_uncompiled=plan.tier == EAGER,
        spent_s=plan.spent_s,
    )
    for group in plan.reads:
        columns = _columns(group, stage, spec)
        filled = [
            (buffer, site_columns)
            for buffer, site_columns in zip(group.buffers, columns, strict=True)
            if site_columns
        ]
        if filled:
            results.reads.append(GroupRows(_rows(group), len(filled)))
            results.tensors += [_taken(buffer, 1, site_columns) for buffer, site_columns in filled]
    for pattern in plan.patterns:
        sites = _sites_in(pattern.active, stage)
        if sites:
            results.patterns.append((pattern.request.request_id, pattern.active.index))
            results.tensors.append(_taken(pattern.out, 0, sites))
    for overflow in plan.overflows:
        results.overflows.append(overflow.flagged_rows)
        results.tensors.append(overflow.flags)
    return results


def with_silent_stages(received: Sequence[StageResults], stage: Stage) -> list[StageResults]:
    """Return the results of all earlier stages; those that have sent nothing have run nothing."""
    complete, start = list[StageResults](), 0
    for results in sorted(received, key=lambda sent: sent.stage.start):
        if start < results.stage.start:
            complete.append(StageResults(Stage(start, results.stage.start)))
        complete.append(results)
        start = results.stage.stop or start
    return [*complete, StageResults(Stage(start, stage.start))] if start < stage.start else complete


def add_results(plan: StepPlan, results: StageResults, spec: ModelSpec) -> None:
    """Add the results of an earlier stage to the last stage's executed plan, before it is collected."""
    plan.spent_s += results.spent_s
    tensors = iter(results.tensors)
    unfilled = _add_reads(plan, results, spec, tensors) | _add_patterns(plan, results, tensors)
    plan.overflows_before += [
        Overflows(flags, flagged_rows, len(flags))
        for flagged_rows, flags in zip(results.overflows, tensors, strict=True)
    ]
    for request_id, span in plan.spans.items():
        failure = results.failures.get(request_id)
        if failure is not None:
            span.request.fail(failure.code, failure.message)
        elif request_id not in results.request_ids:
            unfilled[request_id, -1] = span.request
    for request in unfilled.values():
        request.fail(
            "intervention_failed",
            "an earlier stage of the pipeline did not run the request's operations; this is a defect of the "
            "server, please report it",
        )


def _add_reads(
    plan: StepPlan, results: StageResults, spec: ModelSpec, tensors: Iterator[torch.Tensor]
) -> Unfilled:
    """Fill the columns of the stage's sites; return the operations for which it has sent nothing.

    A group with the same rows on both stages is filled at once, otherwise operation by operation.
    """
    columns = {id(group): _columns(group, results.stage, spec) for group in plan.reads}
    groups = [group for group in plan.reads if any(columns[id(group)])]
    wholes = {_rows(group): group for group in groups}
    pieces = {
        (piece.request.request_id, piece.active.index): (group, piece)
        for group in groups
        for piece in group.slices
    }
    for rows, num_tensors in results.reads:
        parts = [next(tensors) for _ in range(num_tensors)]
        whole = wholes.get(rows)
        if whole is not None:
            _fill(whole.buffers, columns[id(whole)], parts)
            for request_id, op, _ in rows:
                del pieces[request_id, op]
            continue
        start = 0
        for request_id, op, num_rows in rows:
            group, piece = pieces.get((request_id, op), (None, None))
            if group is not None and piece is not None and piece.stop - piece.start == num_rows:
                buffers = [buffer[piece.start : piece.stop] for buffer in group.buffers]
                _fill(buffers, columns[id(group)], [part[start : start + num_rows] for part in parts])
                del pieces[request_id, op]
            start += num_rows
    return {key: piece.request for key, (_, piece) in pieces.items()}


def _add_patterns(plan: StepPlan, results: StageResults, tensors: Iterator[torch.Tensor]) -> Unfilled:
    """Fill the patterns of the stage's layers; return the captures for which it has sent nothing."""
    patterns = {
        (planned.request.request_id, planned.active.index): planned
        for planned in plan.patterns
        if _sites_in(planned.active, results.stage)
    }
    for key in results.patterns:
        tensor, pattern = next(tensors), patterns.get(key)
        if pattern is not None and tensor.shape[1:] == pattern.out.shape[1:]:
            _write_columns(pattern.out, 0, _sites_in(pattern.active, results.stage), tensor)
            del patterns[key]
    return {key: planned.request for key, planned in patterns.items()}


def _rows(group: ReadGroup) -> tuple[Rows, ...]:
    """Return which operations a group reads, and on how many rows; to compare groups of two stages."""
    return tuple(
        (part.request.request_id, part.active.index, part.stop - part.start) for part in group.slices
    )


def _sites_in(active: ActiveOp, stage: Stage) -> list[int]:
    return [index for index, key in enumerate(active.keys) if stage.has(key)]


def _columns(group: ReadGroup, stage: Stage, spec: ModelSpec) -> list[list[int]]:
    """Return, for each buffer of a group, the columns that belong to the stage's sites."""
    active = group.slices[0].active
    sites_held = _sites_in(active, stage)
    columns = [
        [column for column, site in enumerate(sites) if site in sites_held]
        for sites in width_classes(active.op, spec)
    ]
    if len(columns) < len(group.buffers):
        columns.append(sites_held)  # the last buffer says whether values overflow
    return columns


def _fill(
    buffers: Sequence[torch.Tensor], columns: Sequence[list[int]], parts: Sequence[torch.Tensor]
) -> None:
    """Write parts into the columns of those buffers that have some."""
    filled = [
        (buffer, site_columns) for buffer, site_columns in zip(buffers, columns, strict=True) if site_columns
    ]
    for (buffer, site_columns), part in zip(filled, parts, strict=True):
        _write_columns(buffer, 1, site_columns, part)


def contiguous_span(rows: list[int]) -> tuple[int, int] | None:
    """Return ``(start, stop)`` if ``rows`` ascend without a gap, else None."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return rows[0], rows[0] + len(rows)
    return None


def _taken(values: torch.Tensor, axis: int, columns: list[int]) -> torch.Tensor:
    """Return some columns along an axis; a view if they are adjacent."""
    span = contiguous_span(columns)
    if span is None:
        return values.index_select(axis, to_device(np.asarray(columns, np.int64), values.device))
    return values.narrow(axis, span[0], span[1] - span[0])


def _write_columns(values: torch.Tensor, axis: int, columns: list[int], part: torch.Tensor) -> None:
    """Write a part over some columns along an axis."""
    span = contiguous_span(columns)
    if span is None:
        values.index_copy_(axis, to_device(np.asarray(columns, np.int64), values.device), part)
    else:
        values.narrow(axis, span[0], span[1] - span[0]).copy_(part)
