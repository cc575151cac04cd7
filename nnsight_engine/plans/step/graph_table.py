"""The table that a captured graph reads: in memory that stays, and filled before each replay.

While a graph is captured, each tap launches the executor on its part of the table; a replay does what the
table then has. Requests whose operations are instructions at the taps fit; their other work, at the final
norm, the logits and behind the step, needs no graph.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection
from typing import Final

import numpy as np
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step.active import ActiveOp, ActiveRequest, ActiveScore
from nnsight_engine.plans.step.context import SiteKey
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.instructions import Executor, Number, Word
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.plans.step.table import Programs, Segment

logger = logging.getLogger(__name__)

_PER_TAP: Final = 4
"""Instructions for which the table has room, for each row and tap on the average."""


class GraphTable:
    """Programs of all rows at all taps; the ``num_taps`` of all stages must have room for as much."""

    def __init__(
        self,
        taps: Collection[int],
        num_taps: int,
        num_rows: int,
        width: int,
        device: torch.device,
        executor: Executor,
    ) -> None:
        self.max_instructions = _PER_TAP * num_rows * num_taps
        self._tap_indices = {tap: index for index, tap in enumerate(sorted(taps))}
        self._num_rows = num_rows
        self._width = width
        self._bounds = torch.zeros(len(taps), num_rows + 1, dtype=torch.int64, device=device)
        self._words = torch.zeros(self.max_instructions, len(Word), dtype=torch.int64, device=device)
        self._numbers = torch.zeros(self.max_instructions, len(Number), device=device)
        rows = torch.arange(num_rows, dtype=torch.int64, device=device)
        self._executes = {
            tap: executor(rows, self._bounds[index], self._words, self._numbers)
            for tap, index in self._tap_indices.items()
        }
        # What the table has; a plan that is run again need not be copied again.
        self._filled: weakref.ref[Programs] | None = None

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        return self._bounds, self._words, self._numbers

    def has(self, tap: int) -> bool:
        return tap in self._executes

    def run(self, tap: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        self._executes[tap](0, min(len(hidden), self._num_rows), hidden, residual)

    def serve(self, plan: StepPlan) -> None:
        """Have the taps do what a plan says; if that fails, its requests do, and the taps do nothing."""
        begin = time.monotonic()
        plan.ran.update(plan.taps())
        try:
            self.fill(plan)
        except Exception as error:
            logger.exception("a plan could not be put into the table of graphs")
            self._bounds.zero_()
            self._filled = None
            for span in plan.spans.values():
                span.request.fail_by(error, "its operations could not be put into the table of a graph")
        plan.spent_s += time.monotonic() - begin

    def fill(self, plan: StepPlan | None) -> None:
        """Have the taps do what a plan says, or nothing; raise ``intervention_failed`` if it does not fit."""
        groups = {} if plan is None else plan.groups
        first = next((segments[0] for key, segments in groups.items() if isinstance(key, int)), None)
        if plan is None or first is None:
            if self._filled is not None:
                self._bounds.zero_()
                self._filled = None
            return
        if isinstance(first, Segment) and self._filled is not None and self._filled() is first.programs:
            return
        segments = self._segments(plan)
        programs = next(iter(segments.values())).programs
        sizes = np.diff(programs.bounds)
        bounds = np.zeros(self._bounds.shape, np.int64)
        for tap_index, segment in segments.items():
            entries = slice(segment.first, segment.stop)
            bounds[tap_index, 0] = programs.bounds[segment.first]
            bounds[tap_index, programs.rows[entries] + 1] = sizes[entries]
        # Their sums are bounds of the programs of all rows; rows without one have an empty program.
        num, device = len(programs.words), self._bounds.device
        self._words[:num].copy_(to_device(programs.words, device))
        self._numbers[:num].copy_(to_device(programs.numbers, device))
        self._bounds.copy_(to_device(bounds.cumsum(1), device))
        self._filled = weakref.ref(programs)

    def _segments(self, plan: StepPlan) -> dict[int, Segment]:
        """Return the segment of each tap, by the tap's index; raise for work that a graph cannot do."""
        segments = {}
        for key, groups in plan.groups.items():
            if not isinstance(key, int):
                continue
            tap_index, segment = self._tap_indices.get(key), groups[0]
            if (
                tap_index is None
                or len(groups) > 1
                or not isinstance(segment, Segment)
                or segment.num_rows > self._num_rows
                or segment.width != self._width
                or len(segment.programs.words) > self.max_instructions
            ):
                raise InterventionError(
                    "intervention_failed",
                    "its operations were taken for ones that a captured graph can do; this is a defect of "
                    "the server, please report it with the request",
                )
            segments[tap_index] = segment
        return segments


def instructions_per_row(request: ActiveRequest, taps: Collection[int], *, has_drafts: bool) -> int | None:
    """Return the most instructions of a request at a generated position; None if it has other work.

    With drafts a step may have several of its rows; tests with a history then wait for others.
    """
    # Tests with slots are evaluated at every row, also where their operation does not act.
    with_slots = {op.index for op in request.ops for test in op.tests if test.slot is not None}
    ops = [
        active
        for active in request.ops
        if not active.op.is_in_encoder and (active.constant is not False or active.index in with_slots)
    ]
    if (with_slots and has_drafts) or not all(_fits(active, taps) for active in ops):
        return None
    return sum(map(_num_instructions, ops))


def _fits(active: ActiveOp, taps: Collection[int]) -> bool:
    """Return whether a graph can do an operation: by instructions at its taps, and work behind the step."""
    # The mean over a prompt was taken before.
    is_instruction = active.program is not None or active.op.reads or active.op.averages_prompt
    return (
        is_instruction
        and not active.op.captures_patterns
        and all(_is_reached(key, taps) for key in active.keys)
        and all(_is_read(score, taps) for score in _scores(active))
    )


def _is_reached(key: SiteKey, taps: Collection[int]) -> bool:
    return key in taps if isinstance(key, int) else key.layer < 0


def _is_read(score: ActiveScore, taps: Collection[int]) -> bool:
    return all(_is_reached(key, taps) for key in score.keys) and not any(score.dictionaries)


def _scores(active: ActiveOp) -> list[ActiveScore]:
    scores = [] if active.score is None else [active.score]
    return scores + [test.score for test in active.tests]


def _num_instructions(active: ActiveOp) -> int:
    """Return the most instructions of an operation for one row: its own, a gate, and those of its scores."""
    count = 0 if active.op.kind is OperationKind.DETECT else len(active.keys)
    has_gate = bool(active.tests)
    return count + has_gate + sum(len(score.keys) + 1 for score in _scores(active))
