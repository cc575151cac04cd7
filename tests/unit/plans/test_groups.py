"""A fused kernel that raises is tried member by member, and only the guilty fail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, PlannedSite, RequestPlan
from nnsight_engine.plans.step.active import Acquired, ActiveOp, ActiveRequest
from nnsight_engine.plans.step.banks import ScoreSlots
from nnsight_engine.plans.step.plan import KernelGroup, StepPlan
from nnsight_engine.plans.step.table import Member, Programs, Segment


@dataclasses.dataclass
class Adding:
    """Adds one to its rows, or raises where one of them is poisoned."""

    rows: list[int]
    poisoned: int

    def run(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        if self.poisoned in self.rows:
            raise InterventionError("intervention_failed", "row is poisoned")
        hidden[self.rows] += 1


def member(row: int) -> Member:
    op = PlannedOp(OperationKind.FEATURE, (PlannedSite("output", 0),))
    active = ActiveOp(op, 0, (1,), None, None, True, (4,))
    request = ActiveRequest(str(row), RequestPlan(1, (op,)), [active], Acquired(), True)
    return Member(request, active, writes=True)


def test_only_the_member_that_raises_fails() -> None:
    members = [member(row) for row in range(3)]
    group = KernelGroup(Adding([0, 1, 2], 1), members, lambda number: Adding([number], 1))
    hidden = torch.zeros(3, 4)
    group.run(hidden, None)
    assert hidden[:, 0].tolist() == [1.0, 0.0, 1.0]
    assert [m.request.failure is not None for m in members] == [False, True, False]


def test_a_site_that_the_forward_never_reached_fails_its_requests() -> None:
    reached, missed = member(0), member(1)
    plan = StepPlan(
        {},
        groups={
            1: [KernelGroup(Adding([0], -1), [reached])],
            2: [KernelGroup(Adding([1], -1), [missed])],
        },
    )
    plan.run(1, torch.zeros(2, 4), None)
    plan.fail_unreached()
    assert reached.request.failure is None
    assert missed.request.failure is not None
    assert missed.request.failure.code == "intervention_failed"


@pytest.mark.parametrize(
    ("shape", "residual_shape"), [((2, 4), (2, 4)), ((3, 5), (3, 5)), ((3, 4), (3, 5)), ((3, 1, 4), None)]
)
def test_a_value_that_instructions_would_leave_fails_their_requests(
    shape: tuple[int, ...], residual_shape: tuple[int, ...] | None
) -> None:
    one, calls = member(2), list[int]()
    words, numbers = np.zeros(2, np.int64), np.zeros(2, np.float32)
    table = (words, words, words, numbers)
    programs = Programs(lambda *_: lambda *_: calls.append(1), torch.device("cpu"), *table)
    segment = Segment(programs, 0, 1, [one], num_rows=3, width=4)
    segment.run(torch.zeros(shape), None if residual_shape is None else torch.zeros(residual_shape))
    assert not calls
    assert one.request.failure is not None
    assert "defect of the server" in one.request.failure.message
    segment.run(torch.zeros(3, 4), torch.zeros(3, 4))
    assert calls


def test_slots_of_scores_stay_where_they_are() -> None:
    slots = ScoreSlots(torch.device("cpu"))
    held = [slots.acquire(100) for _ in range(9)]
    places = [(slot.table.held.data_ptr(), slot.row) for slot in held]
    assert len(set(places)) == len(held) == len(slots)
    first = held[0].table.held
    more = [slots.acquire(100) for _ in range(20)]
    assert held[0].table.held is first
    for slot in [*held, *more]:
        slots.release(slot)
    assert not len(slots)
