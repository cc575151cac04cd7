"""What waits for an output leaves with the right one, whoever ends the request."""

from __future__ import annotations

import numpy as np

from nnsight_engine.plans.collect.outbox import PendingResults
from nnsight_engine.plans.records import Payload, StepInfo, StepRecord
from nnsight_engine.plans.request_plan import OperationKind, PlannedOp, RequestPlan
from nnsight_engine.plans.sites import PlannedSite

SITE = PlannedSite("output", 3)


def plan(*, stream: bool) -> RequestPlan:
    rows = PlannedOp(OperationKind.CAPTURE, (SITE,), name="rows")
    mean = PlannedOp(OperationKind.CAPTURE, (SITE,), name="mean", reduce="mean")
    last = PlannedOp(OperationKind.CAPTURE, (SITE,), name="last", reduce="last")
    return RequestPlan(prompt_len=2, ops=(rows, mean, last), stream=stream)


def step(position: int) -> list[StepRecord]:
    data = np.full(4, position, np.float32).tobytes()
    return [StepRecord(op, [position], [data]) for op in range(3)]


def absorb(pending: PendingResults, position: int) -> None:
    pending.absorb(step(position), StepInfo(0, position + 1, 0, "tap"), None)


def positions(payload: Payload | None) -> dict[int, list[int]]:
    assert payload is not None
    found: dict[int, list[int]] = {}
    for record in Payload.decode(payload.encode()).records:
        found.setdefault(record.op, []).extend(record.positions)
    return found


def test_a_whole_answer_leaves_at_the_end_with_its_reductions() -> None:
    pending = PendingResults(plan(stream=False), stops_outside=False)
    for position in (1, 2, 3):
        absorb(pending, position)
        assert pending.take(final=False) is None
    payload = pending.take(final=True)
    assert positions(payload) == {0: [1, 2, 3], 1: [1, 2, 3], 2: [3]}
    assert payload is not None
    (total,) = (np.frombuffer(r.parts[0], np.float32) for r in payload.records if r.op == 1)
    assert total.tolist() == [6.0] * 4


def test_a_stream_gets_rows_as_they_come_and_reductions_at_the_end() -> None:
    pending = PendingResults(plan(stream=True), stops_outside=False)
    absorb(pending, 1)
    assert positions(pending.take(final=False)) == {0: [1]}
    absorb(pending, 2)
    assert positions(pending.take(final=True)) == {0: [2], 1: [1, 2], 2: [2]}


def test_with_stop_strings_every_output_may_be_the_last() -> None:
    pending = PendingResults(plan(stream=False), stops_outside=True)
    absorb(pending, 1)
    assert positions(pending.take(final=False)) == {0: [1], 1: [1], 2: [1]}
    absorb(pending, 2)
    payload = pending.take(final=False)
    assert positions(payload) == {0: [2], 1: [1, 2], 2: [2]}
    assert payload is not None
    assert payload.info == StepInfo(0, 3, 0, "tap")
