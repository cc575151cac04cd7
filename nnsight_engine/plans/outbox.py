"""Results between the worker and the outputs that they leave with, in the scheduler's process.

The scheduler hands each step's results over, and takes a request's when an output leaves for it. A step of a
run (``shared_run``) costs the same however many requests take part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnsight_engine.plans.records import Failure, Payload, RunStep, StepInfo, StepRecord, StepResults
from nnsight_engine.plans.request_plan import PlannedOp, RequestPlan
from nnsight_engine.plans.shared_run import RunSlot, SharedRun


class PendingResults:
    """One request's records between the worker and the next output that leaves for it.

    Reductions are folded here, so that a long generation holds one row, not one per token.

    Args:
        plan: The request's plan.
        stops_outside: Whether the API process may end the request by itself, at a stop string:
            no output is then known to be the last, so each carries all that is known.
    """

    def __init__(self, plan: RequestPlan, *, stops_outside: bool) -> None:
        """Start with nothing to send."""
        self._plan = plan
        self._stops_outside = stops_outside
        self._records: list[StepRecord] = []
        self._reduced: dict[int, StepRecord] = {}
        self._info: StepInfo | None = None
        self._failure: Failure | None = None
        self._run: SharedRun | None = None
        self._places: list[RunSlot] = []
        self._num_met = 0
        self._met_s = 0.0

    @property
    def sends_each_time(self) -> bool:
        """Whether outputs before the last may have something to carry."""
        return self._stops_outside or self._plan.stream

    def absorb(self, records: Sequence[StepRecord], info: StepInfo | None, failure: Failure | None) -> None:
        """Take over one step's records."""
        for record in records:
            op = self._plan.ops[record.op]
            if op.reduce == "none":
                self._records.append(record)
            else:
                self._fold(op, record)
        self._info = info or self._info
        self._failure = failure or self._failure

    def _fold(self, op: PlannedOp, record: StepRecord) -> None:
        held = self._reduced.get(record.op)
        if held is None or op.reduce == "last":
            self._reduced[record.op] = record
            return
        held.parts = [
            (np.frombuffer(total, np.float32) + np.frombuffer(part, np.float32)).tobytes()
            for total, part in zip(held.parts, record.parts, strict=True)
        ]
        held.positions.extend(record.positions)

    def reduction(self, op: int) -> list[bytes] | None:
        """Return what an operation's reduction has come to."""
        held = self._reduced.get(op)
        return None if held is None else held.parts

    def join(self, run: SharedRun, places: list[RunSlot]) -> None:
        """Take part in a run from now on."""
        self._run, self._places = run, places
        self._num_met, self._met_s = 0, 0.0

    def leave(self) -> None:
        """Take what the run has brought, and let go of it."""
        self._catch_up()
        self._run, self._places = None, []

    def _catch_up(self) -> None:
        """Take what the run has brought since this was last asked for."""
        run, info = self._run, self._info
        if run is None or info is None or run.num_steps == self._num_met:
            return
        end_position = info.end_position + run.num_steps - self._num_met
        positions = list(range(info.end_position, end_position))
        for place in self._places:
            self._take_over(place.op, positions, place.rows.of(place.row, self._num_met))
        spent_s = info.spent_s + self._plan.num_points * (run.point_s - self._met_s)
        self._info = StepInfo(info.first_position, end_position, info.recomputed_tokens, info.tier, spent_s)
        self._num_met, self._met_s = run.num_steps, run.point_s

    def _take_over(self, op: int, positions: list[int], parts: list[bytes]) -> None:
        match self._plan.ops[op].reduce:
            case "none":
                self._records.append(StepRecord(op, positions, parts))
            case "last":
                self._reduced[op] = StepRecord(op, positions[-1:], parts)
            case _:
                # The run's total began with what was held.
                held = self._reduced.setdefault(op, StepRecord(op, [], []))
                held.positions.extend(positions)
                held.parts = parts

    def take(self, *, final: bool) -> Payload | None:
        """Return what should leave now and forget it; None while nothing should.

        A request that does not stream hands over everything with its last output, a streaming
        one what it has with each, its reductions with the last.
        """
        complete = final or self._stops_outside
        if not complete and not self._plan.stream:
            return None
        self._catch_up()
        if not complete and not self._records:
            return None
        records, self._records = self._records, []
        if complete:
            # Reductions stay: a later output carries the whole of them again.
            records.extend(self._reduced.values())
        return Payload(records=records, info=self._info, failure=self._failure)


class Outbox:
    """What waits for outputs to leave, by vLLM's request id."""

    def __init__(self) -> None:
        """Start empty."""
        self._pending: dict[str, PendingResults] = {}
        self._each_time: set[str] = set()
        self._run: SharedRun | None = None

    def __len__(self) -> int:
        """Return for how many requests something may wait."""
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        """Tell whether something may wait for a request's outputs."""
        return request_id in self._pending

    @property
    def sends_each_time(self) -> bool:
        """Whether somebody's outputs before the last may have something to carry."""
        return bool(self._each_time)

    def open(self, request_id: str, plan: RequestPlan, *, stops_outside: bool) -> None:
        """Expect results of a request, see ``PendingResults``."""
        pending = self._pending[request_id] = PendingResults(plan, stops_outside=stops_outside)
        if pending.sends_each_time:
            self._each_time.add(request_id)

    def close(self, request_id: str) -> bool:
        """Drop what waits for a request; returns whether it was expected."""
        self._each_time.discard(request_id)
        is_expected = self._pending.pop(request_id, None) is not None
        if not self._pending:
            self._run = None  # an idle engine has no next step to end it
        return is_expected

    def absorb(self, results: StepResults | None) -> None:
        """Take over a step's results, None where nobody who took part intervened."""
        step = None if results is None else results.run_step
        if step is None or step.opening is not None:
            self._end_run()
        if step is not None:
            self._go_on(step)
        if results is None:
            return
        for request_id, info in results.infos.items():
            pending = self._pending.get(request_id)
            if pending is not None:
                pending.absorb(results.records.get(request_id, ()), info, None)
        for request_id, failure in results.failures.items():
            pending = self._pending.get(request_id)
            if pending is not None:
                pending.absorb((), None, failure)

    def take(self, request_id: str, *, final: bool) -> Payload | None:
        """Return what leaves with an output of a request that is expected here, None for nothing."""
        return self._pending[request_id].take(final=final)

    def _go_on(self, step: RunStep) -> None:
        if step.opening is not None:
            run = self._run = SharedRun(step.opening, self._reduction)
            for request_id, places in run.places.items():
                if request_id in self._pending:
                    self._pending[request_id].join(run, places)
        # A step without a run would leave its requests short of positions, which fails them (``collector``).
        if self._run is not None:
            self._run.add(step)

    def _reduction(self, request_id: str, op: int) -> list[bytes] | None:
        pending = self._pending.get(request_id)
        return None if pending is None else pending.reduction(op)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        for request_id in () if run is None else run.places:
            if request_id in self._pending:
                self._pending[request_id].leave()
