"""Copies the values that a step has read to the host, and makes the delivery of its results.

``collect`` starts the copies before sampling, with lens projections batched over layers and requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from nnsight_engine.plans.records import RunGroup, RunOpening
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step.delivery import Flags, Participant, ReadRows, RunDelivery, StepDelivery
from nnsight_engine.plans.step.host_arena import HostArena, HostCopy
from nnsight_engine.plans.step.lens import LensReader
from nnsight_engine.plans.step.overflows import Overflows
from nnsight_engine.plans.step.plan import PlannedSample, ReadGroup, StepPlan
from nnsight_engine.plans.step.steady_run import SteadyRun

logger = logging.getLogger(__name__)

LENS_CHUNK_ROWS = 128
"""Rows projected to the vocabulary at once, which limits the scratch memory of a lens."""

LensLogits = Callable[[torch.Tensor], torch.Tensor | None]
"""Maps residual stream ``[rows, hidden]`` to logits ``[rows, vocabulary]``; None on a rank without them."""


class StepCollection:
    """``arena`` is None if the values are on the host, and are delivered before the next step."""

    def __init__(self, lens_logits: LensLogits, arena: HostArena | None) -> None:
        self._lens_logits = lens_logits
        self._lens_reader = LensReader()
        self._arena = arena

    def collect(self, plan: StepPlan) -> None:
        """Start copying the values that an executed plan has read to the host; does not wait for them."""
        begin = time.monotonic()
        plan.keep_means()
        sources: list[torch.Tensor] = []
        computed = self._computed(plan)
        for group in plan.reads:
            try:
                parts = computed[id(group)] if id(group) in computed else self._parts(group)
            except Exception as error:
                logger.exception("a group of reads could not be collected")
                for piece in group.slices:
                    piece.request.fail("intervention_failed", f"results could not be collected: {error}")
                parts = []
            group.num_parts = len(parts)
            sources += parts
        sources += [pattern.out for pattern in plan.patterns]
        sources += plan.masks
        sources += [own.flags for own in _overflows(plan)]
        plan.copy = HostCopy(sources) if self._arena is None else self._arena.start_copy(sources)
        plan.spent_s += time.monotonic() - begin

    def _parts(self, group: ReadGroup) -> list[torch.Tensor]:
        op = group.slices[0].active.op
        if op.kind is OperationKind.LENS:
            return self._lens(group.buffers[0], op.top_k, op.targets)
        return group.buffers

    def _computed(self, plan: StepPlan) -> dict[int, list[torch.Tensor]]:
        """Return the parts of groups by their ``id``; what fails together is computed for each group."""
        found: dict[int, list[torch.Tensor]] = {}
        waiting = list(plan.computed)
        while waiting:
            reads = waiting.pop()
            try:
                found |= reads.read()
            except Exception as error:
                logger.exception("features could not be computed")
                if len(reads.groups) > 1:
                    waiting += reads.alone()
                    continue
                (group,) = reads.groups
                for piece in group.slices:
                    piece.request.fail("intervention_failed", f"features could not be computed: {error}")
                found[id(group)] = []
        return found

    def _lens(self, residual: torch.Tensor, top_k: int, targets: tuple[int, ...]) -> list[torch.Tensor]:
        num_rows, num_sites, hidden = residual.shape
        chunks = []
        for rows in residual.reshape(-1, hidden).split(LENS_CHUNK_ROWS):
            logits = self._lens_logits(rows)
            if logits is None:
                # Another rank has the logits, and only its results are sent.
                return []
            chunks.append(self._lens_reader.read(logits, top_k, targets))
        columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
        return [column.reshape(num_rows, num_sites, -1) for column in columns]


def step_delivery(plan: StepPlan) -> StepDelivery:
    """Advance the requests of an executed and collected plan, and return the delivery of its results."""
    copy, reads, rest = _taken(plan)
    patterns, rest = rest[: len(plan.patterns)], rest[len(plan.patterns) :]
    masks, flags = rest[: len(plan.masks)], rest[len(plan.masks) :]
    plan.share_time()
    plan.is_unreported = False
    participants = {}
    for request_id, span in plan.spans.items():
        request = span.request
        request.advance(span.start, span.stop, span.num_drafts)
        participants[request_id] = Participant(
            request,
            span.start,
            span.stop,
            span.num_drafts,
            request.has_drafts,
            request.info(),
            request.failure,
        )
    return StepDelivery(
        copy,
        participants,
        [ReadRows(group.slices, parts, group.mask) for group, parts in zip(plan.reads, reads, strict=True)],
        list(zip(plan.patterns, patterns, strict=True)),
        plan.samples,
        masks,
        _flagged(plan, flags),
    )


def run_delivery(run: SteadyRun) -> RunDelivery:
    plan = run.plan
    copy, reads, flags = _taken(plan)
    run.count_time()
    samples = [[sample.request.request_id for sample in captures] for _, captures in _samples(plan)]
    opening = _opening(plan) if run.num_steps == 1 else None
    return RunDelivery(copy, run, run.num_steps, run.point_s, reads, samples, _flagged(plan, flags), opening)


def _taken(plan: StepPlan) -> tuple[HostCopy, list[list[torch.Tensor]], list[torch.Tensor]]:
    copy = plan.copy
    if copy is None:
        raise RuntimeError("the reads of this step were never collected")
    values = iter(copy.values)
    reads = [[next(values) for _ in range(group.num_parts)] for group in plan.reads]
    return copy, reads, list(values)


def _overflows(plan: StepPlan) -> list[Overflows]:
    return plan.overflows + plan.overflows_before


def _flagged(plan: StepPlan, flags: list[torch.Tensor]) -> list[Flags]:
    return [Flags(own.segments, host) for own, host in zip(_overflows(plan), flags, strict=True)]


def _samples(plan: StepPlan) -> list[tuple[str, list[PlannedSample]]]:
    groups: dict[str, list[PlannedSample]] = {}
    for sample in plan.samples:
        groups.setdefault(sample.active.op.reduce, []).append(sample)
    return list(groups.items())


def _opening(plan: StepPlan) -> RunOpening:
    reads = [
        RunGroup(
            group.slices[0].active.op.reduce,
            [(piece.request.request_id, piece.active.index) for piece in group.slices],
        )
        for group in plan.reads
    ]
    samples = [
        RunGroup(reduce, [(sample.request.request_id, sample.active.index) for sample in captures])
        for reduce, captures in _samples(plan)
    ]
    return RunOpening(list(plan.spans), [*reads, *samples])
