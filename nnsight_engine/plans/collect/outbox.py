"""Results between the worker and the request outputs, in the scheduler's process.

Results of a streak's steps are stored for all its requests together. A request's part is extracted when an
output is sent for it, or when the streak ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from nnsight_engine.plans.records import (
    DraftedRows,
    Failure,
    Payload,
    StepInfo,
    StepRecord,
    StepResults,
    StreakGroup,
    StreakOpening,
    StreakStep,
    reduced_rows,
)
from nnsight_engine.plans.request_plan import PlannedOp, RequestPlan

HeldParts = Callable[[str, int], list[bytes] | None]
"""Returns a request's reduction so far, by request id and index of the operation; None if there is none."""


class StreakRows(Protocol):
    """The values of one group of reads in a streak; ``parts`` are those of a step, a row for each member."""

    def add(self, parts: list[bytes]) -> None: ...

    def values_since(self, row: int, since: int) -> list[bytes]:
        """Return one member's values of the steps from ``since`` on, or their reduction."""


class EveryStep:
    """Keeps the values of all steps, for reads that are not reduced."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._steps: list[list[bytes]] = []

    def add(self, parts: list[bytes]) -> None:
        self._steps.append(parts)

    def values_since(self, row: int, since: int) -> list[bytes]:
        columns = zip(*self._steps[since:], strict=True)
        return [b"".join(_row(part, row, self._num_rows) for part in column) for column in columns]


class LastStep:
    """Keeps the values of the last step, for reads that are reduced to it."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._parts: list[bytes] = []

    def add(self, parts: list[bytes]) -> None:
        self._parts = parts

    def values_since(self, row: int, since: int) -> list[bytes]:
        del since
        return [_row(part, row, self._num_rows) for part in self._parts]


class Totals:
    """Sums in float32, in the order of each member alone; ``sums_before`` are those before the streak."""

    def __init__(self, sums_before: list[list[bytes] | None]) -> None:
        self._sums_before = sums_before
        self._totals: list[npt.NDArray[np.float32]] = []

    def add(self, parts: list[bytes]) -> None:
        rows = [np.frombuffer(part, np.float32).reshape(len(self._sums_before), -1) for part in parts]
        if not self._totals:
            self._totals = [part.copy() for part in rows]
            for row, sums in enumerate(self._sums_before):
                for index, sum_before in enumerate(sums or ()):
                    self._totals[index][row] += np.frombuffer(sum_before, np.float32)
            return
        for total, part in zip(self._totals, rows, strict=True):
            np.add(total, part, out=total)

    def values_since(self, row: int, since: int) -> list[bytes]:
        del since
        return [total[row].tobytes() for total in self._totals]


@dataclasses.dataclass(frozen=True, slots=True)
class StreakSlot:
    """Where a request finds its values of an operation: a row of a group."""

    op: int
    rows: StreakRows
    row: int


class SharedStreak:
    """A streak in progress; ``reduction_before`` returns a member's reduction before the streak."""

    def __init__(self, opening: StreakOpening, reduction_before: HeldParts) -> None:
        self.num_steps = 0
        self.point_s = 0.0
        self.slots: dict[str, list[StreakSlot]] = {request_id: [] for request_id in opening.request_ids}
        self._groups: list[StreakRows] = []
        for group in opening.groups:
            rows = _rows_of_group(group, reduction_before)
            self._groups.append(rows)
            for row, (request_id, op) in enumerate(group.members):
                self.slots[request_id].append(StreakSlot(op, rows, row))

    def add(self, step: StreakStep) -> None:
        self.num_steps, self.point_s = step.num_steps, step.point_s
        for rows, parts in zip(self._groups, step.parts, strict=True):
            rows.add(parts)


def _rows_of_group(group: StreakGroup, reduction_before: HeldParts) -> StreakRows:
    """Return where a group's values are kept, depending on how they are reduced."""
    match group.reduce:
        case "mean":
            return Totals([reduction_before(request_id, op) for request_id, op in group.members])
        case "last":
            return LastStep(len(group.members))
        case _:
            return EveryStep(len(group.members))


def _row(part: bytes, row: int, num_rows: int) -> bytes:
    size = len(part) // num_rows
    return part[row * size : (row + 1) * size]


class PendingResults:
    """One request's records until an output is sent for it, with reductions folded to one row.

    ``stops_outside``: the API process may end the request at a stop string; no output is then known to be the
    last, so each carries all.
    """

    def __init__(self, plan: RequestPlan, *, stops_outside: bool) -> None:
        self._plan = plan
        self._stops_outside = stops_outside
        self._records: list[StepRecord] = []
        self._reduced: dict[int, StepRecord] = {}
        self._info: StepInfo | None = None
        self._failure: Failure | None = None
        self._streak: SharedStreak | None = None
        self._slots: list[StreakSlot] = []
        self._num_collected = 0
        self._collected_s = 0.0

    @property
    def sends_each_time(self) -> bool:
        """Whether outputs before the last may carry results."""
        return self._stops_outside or self._plan.stream

    def absorb(self, records: Sequence[StepRecord], info: StepInfo | None, failure: Failure | None) -> None:
        """Add what a step delivers; None for progress or failure leaves what is known."""
        for record in records:
            self._add(record)
        self._info = info or self._info
        self._failure = failure or self._failure

    def absorb_drafted(
        self, records: Sequence[StepRecord], info: StepInfo, rows: DraftedRows, num_tokens: int
    ) -> None:
        """Add the unreduced records of one step of a request that has drafts, or has had some.

        Positions, too high by as many drafts as were refused, are corrected; rows of refused drafts
        are left out, and so are positions added before. The step has yielded ``num_tokens``.
        """
        before = StepInfo(rows.start, rows.start, 0, info.tier) if self._info is None else self._info
        end, num_kept = before.end_position, rows.num_kept(num_tokens)
        # Rows follow those of the last step, unless they are computed again. A start in the prompt is exact.
        start = rows.start if rows.start <= self._plan.prompt_len else min(rows.start, end)
        stop = start + num_kept
        for record in records:
            positions = np.asarray(record.positions, np.int64) - (rows.start - start)
            op = self._plan.ops[record.op]
            first, last = np.searchsorted(positions, (end, stop))
            if first < last:
                chosen = slice(last - 1 if op.reduce == "last" else first, last)
                parts = record.parts
                if not op.captures_patterns:  # captured at prompt positions only, which all count
                    parts = [_chosen(op, part, len(positions), chosen) for part in parts]
                self._add(StepRecord(record.op, positions[chosen].tolist(), parts))
        self._info = StepInfo(
            before.first_position,
            max(end, stop),
            before.recomputed_tokens + max(0, min(end, stop) - start),
            info.tier,
            info.spent_s,
            before.drafted_rows + rows.num_drafts,
            before.refused_rows + rows.num_rows - num_kept,
        )

    def _add(self, record: StepRecord) -> None:
        op = self._plan.ops[record.op]
        if op.reduce == "none":
            self._records.append(record)
        else:
            self._fold(op, record)

    def _fold(self, op: PlannedOp, record: StepRecord) -> None:
        """Combine a record with the reduction so far: the last one counts, or the sum of a mean."""
        reduction = self._reduced.get(record.op)
        if reduction is None or op.reduce == "last":
            self._reduced[record.op] = record
            return
        reduction.parts = [
            (np.frombuffer(total, np.float32) + np.frombuffer(part, np.float32)).tobytes()
            for total, part in zip(reduction.parts, record.parts, strict=True)
        ]
        reduction.positions.extend(record.positions)

    def reduction(self, op: int) -> list[bytes] | None:
        record = self._reduced.get(op)
        return None if record is None else record.parts

    def join(self, streak: SharedStreak, slots: list[StreakSlot]) -> None:
        self._streak, self._slots = streak, slots
        self._num_collected, self._collected_s = 0, 0.0

    def leave(self) -> None:
        self._catch_up()
        self._streak, self._slots = None, []

    def _catch_up(self) -> None:
        """Add the results of the streak's steps since the last call, and advance the progress by them."""
        streak, info = self._streak, self._info
        if streak is None or info is None or streak.num_steps == self._num_collected:
            return
        end_position = info.end_position + streak.num_steps - self._num_collected
        positions = list(range(info.end_position, end_position))
        for slot in self._slots:
            self._add_from_streak(slot.op, positions, slot.rows.values_since(slot.row, self._num_collected))
        spent_s = info.spent_s + self._plan.num_points * (streak.point_s - self._collected_s)
        self._info = msgspec.structs.replace(info, end_position=end_position, spent_s=spent_s)
        self._num_collected, self._collected_s = streak.num_steps, streak.point_s

    def _add_from_streak(self, op: int, positions: list[int], parts: list[bytes]) -> None:
        match self._plan.ops[op].reduce:
            case "none":
                self._records.append(StepRecord(op, positions, parts))
            case "last":
                self._reduced[op] = StepRecord(op, positions[-1:], parts)
            case _:
                # The streak's total includes the value held before the streak.
                reduction = self._reduced.setdefault(op, StepRecord(op, [], []))
                reduction.positions.extend(positions)
                reduction.parts = parts

    def take_payload(self, *, final: bool) -> Payload | None:
        """Return and remove the results to send with this output; None if there are none.

        Reductions are sent with the last output, and all without streaming.
        """
        complete = final or self._stops_outside
        if not complete and not self._plan.stream:
            return None
        self._catch_up()
        if not complete and not self._records:
            return None
        records, self._records = self._records, []
        if complete:
            # Reductions stay: a later output carries all of them again.
            records.extend(self._reduced.values())
        return Payload(records=records, info=self._info, failure=self._failure)


class Outbox:
    """The results of all requests in the scheduler's process until they are sent."""

    def __init__(self) -> None:
        self._pending: dict[str, PendingResults] = {}
        self._each_time: set[str] = set()
        self._streak: SharedStreak | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    @property
    def sends_each_time(self) -> bool:
        return bool(self._each_time)

    def open(self, request_id: str, plan: RequestPlan, *, stops_outside: bool) -> None:
        pending = self._pending[request_id] = PendingResults(plan, stops_outside=stops_outside)
        if pending.sends_each_time:
            self._each_time.add(request_id)

    def close(self, request_id: str) -> bool:
        """Drop the results of a request; return whether it was registered."""
        self._each_time.discard(request_id)
        is_expected = self._pending.pop(request_id, None) is not None
        if not self._pending:
            self._streak = None  # no next step would end the streak of an idle engine
        return is_expected

    def absorb(self, results: StepResults | None, num_tokens: Mapping[str, int] | None = None) -> None:
        """Add a step's results, None if it has none; ``num_tokens`` are those that each request got in it."""
        step = None if results is None else results.run_step
        if step is None or step.opening is not None:
            self._end_streak()
        if step is not None:
            self._join_shared_streak(step)
        if results is None:
            return
        for request_id, info in results.infos.items():
            pending = self._pending.get(request_id)
            if pending is None:
                continue
            records = results.records.get(request_id, ())
            rows = results.drafted.get(request_id)
            if rows is None:
                pending.absorb(records, info, None)
            else:
                pending.absorb_drafted(records, info, rows, (num_tokens or {}).get(request_id, 0))
        for request_id, failure in results.failures.items():
            pending = self._pending.get(request_id)
            if pending is not None:
                pending.absorb((), None, failure)

    def take_payload(self, request_id: str, *, final: bool) -> Payload | None:
        return self._pending[request_id].take_payload(final=final)

    def _join_shared_streak(self, step: StreakStep) -> None:
        """Add a step of a streak; the first brings the opening, and its requests join."""
        if step.opening is not None:
            streak = self._streak = SharedStreak(step.opening, self._reduction)
            for request_id, slots in streak.slots.items():
                if request_id in self._pending:
                    self._pending[request_id].join(streak, slots)
        # If the opening was missed, the requests lack positions, and the collector fails them.
        if self._streak is not None:
            self._streak.add(step)

    def _reduction(self, request_id: str, op: int) -> list[bytes] | None:
        pending = self._pending.get(request_id)
        return None if pending is None else pending.reduction(op)

    def _end_streak(self) -> None:
        """Have all requests leave the streak with their parts of its results."""
        streak, self._streak = self._streak, None
        for request_id in () if streak is None else streak.slots:
            if request_id in self._pending:
                self._pending[request_id].leave()


def _chosen(op: PlannedOp, part: bytes, num_rows: int, chosen: slice) -> bytes:
    """Return some of a part's rows, reduced as the operation says."""
    # Only the sum of a mean, whose parts are float32, has to know more than the size of a row.
    dtype = np.float32 if op.reduce == "mean" else np.uint8
    rows = np.frombuffer(part, dtype).reshape(num_rows, -1)[chosen]
    return reduced_rows(rows, op.reduce).tobytes()
