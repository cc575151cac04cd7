"""Results of an executed step on their way to the scheduler.

They are needed when the sampled tokens are known, which may be while a later step runs, on another thread. So
a delivery has its own record of all that they consist of, and nothing is planned from it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.records import (
    DraftedRows,
    Failure,
    RunOpening,
    RunStep,
    StepInfo,
    StepRecord,
    StepResults,
    reduced_rows,
)
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.host_arena import HostCopy
from nnsight_engine.plans.step.overflows import Segment, overflow_failures
from nnsight_engine.plans.step.plan import PatternRead, PlannedSample, ReadSlice
from nnsight_engine.plans.step.steady_run import SteadyRun

logger = logging.getLogger(__name__)

SampledIds = Sequence[Sequence[int]]
"""Sampled token ids of each request of a step, empty for an incomplete prompt."""


class Delivery(Protocol):
    def results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults:
        """Return the results; called once. ``sampled`` is empty on ranks whose results are not used."""


@dataclasses.dataclass(slots=True)
class Participant:
    """A request of the step; ``has_drafts`` if it has had drafts in this step or earlier."""

    request: ActiveRequest
    start: int
    stop: int
    num_drafts: int
    has_drafts: bool
    info: StepInfo
    failure: Failure | None

    @property
    def work(self) -> int:
        return (self.stop - self.start) * self.request.plan.num_points


class ReadRows(NamedTuple):
    """The values of a group of reads; ``mask`` is an index, None if all rows are delivered."""

    slices: list[ReadSlice]
    parts: list[torch.Tensor]
    mask: int | None


class Flags(NamedTuple):
    segments: list[Segment]
    flags: torch.Tensor


@dataclasses.dataclass(slots=True)
class StepDelivery:
    """Results of a step request by request; ``masks``: rows delivered where the device has decided that."""

    copy: HostCopy
    participants: dict[str, Participant]
    reads: list[ReadRows]
    patterns: list[tuple[PatternRead, torch.Tensor]]
    samples: list[PlannedSample]
    masks: list[torch.Tensor]
    overflows: list[Flags]

    def results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults:
        begin = time.monotonic()
        drafted = {
            request_id: DraftedRows(one.start, one.stop - one.start, one.num_drafts)
            for request_id, one in self.participants.items()
            if one.has_drafts
        }
        num_kept = {
            request_id: rows.num_kept(len(sampled[order[request_id]]) if sampled else 0)
            for request_id, rows in drafted.items()
        }
        records: dict[str, list[StepRecord]] = defaultdict(list)
        stopped: list[str] = []
        failures = {key: one.failure for key, one in self.participants.items() if one.failure is not None}
        with self.copy.arrived():
            failures = _overflow_failures(self.overflows, num_kept) | failures
            masks = [host_view(mask).astype(np.bool_) for mask in self.masks]
            for read in self.reads:
                try:
                    self._read(read, None if read.mask is None else masks[read.mask], num_kept, records)
                    stopped += _stopped(read.slices, read.parts)
                except Exception as error:
                    logger.exception("a group of reads could not be delivered")
                    for piece in read.slices:
                        failures.setdefault(piece.request.request_id, _undelivered(error))
            for pattern, part in self.patterns:
                try:
                    record = _pattern_record(pattern, part, masks)
                except Exception as error:
                    logger.exception("attention patterns could not be delivered")
                    failures.setdefault(pattern.request.request_id, _undelivered(error))
                    continue
                if record is not None:
                    records[pattern.request.request_id].append(record)
        for request, active, mask, steps in self.samples:
            ids = sampled[order[request.request_id]] if sampled else []
            own = [step for step in steps if step < len(ids)]
            if own and (mask is None or masks[mask][0]):
                one = self.participants[request.request_id]
                first = one.stop - 1 - one.num_drafts
                data = np.asarray([ids[step] for step in own], np.int64).tobytes()
                positions = [first + step for step in own]
                records[request.request_id].append(StepRecord(active.index, positions, [data]))
        for request_id in failures:
            records.pop(request_id, None)
        stopped = [request_id for request_id in stopped if request_id not in failures]
        self._share_time(time.monotonic() - begin)
        infos = {request_id: one.info for request_id, one in self.participants.items()}
        return StepResults(dict(records), infos, failures, stopped=stopped, drafted=drafted)

    def _read(
        self,
        read: ReadRows,
        mask: npt.NDArray[np.bool_] | None,
        num_kept: Mapping[str, int],
        records: dict[str, list[StepRecord]],
    ) -> None:
        views = [host_view(part) for part in read.parts]
        for piece in read.slices:
            request_id = piece.request.request_id
            new = slice(piece.start + piece.num_delivered, piece.stop)
            offsets = piece.offsets[piece.num_delivered :]
            if not len(offsets):
                continue
            own = [view[new] for view in views]
            first = self.participants[request_id].start if piece.first is None else piece.first
            positions = offsets + first
            # Rows that are reduced here cannot be taken out again.
            reduce = "none" if request_id in num_kept else piece.active.op.reduce
            named = None if mask is None else mask[new]
            if request_id in num_kept:
                is_kept = offsets < num_kept[request_id]
                named = is_kept if named is None else named & is_kept
            if named is not None:
                rows = np.flatnonzero(named)[-1:] if reduce == "last" else np.flatnonzero(named)
                if not len(rows):
                    continue
                own, positions = [part[rows] for part in own], positions[rows]
            data = [reduced_rows(part, reduce).tobytes() for part in own]
            records[request_id].append(StepRecord(piece.active.index, positions.tolist(), data))

    def _share_time(self, seconds: float) -> None:
        """Divide the time that delivering has taken among the requests, by rows times points."""
        per_work = seconds / max(1, sum(one.work for one in self.participants.values()))
        for one in self.participants.values():
            one.request.delivery_s += one.work * per_work
            one.info.spent_s += one.work * per_work


@dataclasses.dataclass(slots=True)
class RunDelivery:
    """Results of a step of a run, for all its requests together; see ``RunStep``."""

    copy: HostCopy
    run: SteadyRun
    num_steps: int
    point_s: float
    reads: list[list[torch.Tensor]]
    samples: list[list[str]]
    overflows: list[Flags]
    opening: RunOpening | None

    def results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults:
        try:
            return self._results(sampled, order)
        except Exception as error:
            logger.exception("a step of a run could not be delivered")
            return StepResults({}, {}, dict.fromkeys(self.run.plan.spans, _undelivered(error)))

    def _results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults:
        begin = time.monotonic()
        stopped: list[str] = []
        with self.copy.arrived():
            parts = [[host_view(part).tobytes() for part in group] for group in self.reads]
            failures = _overflow_failures(self.overflows, {})
            for group, own in zip(self.run.plan.reads, self.reads, strict=True):
                stopped += _stopped(group.slices, own)
        for request_ids in self.samples:
            ids = [sampled[order[request_id]][0] for request_id in request_ids] if sampled else []
            parts.append([np.asarray(ids, np.int64).tobytes()])
        self.run.note_delivery(time.monotonic() - begin)
        point_s = self.point_s + self.run.delivery_point_s
        step = RunStep(self.num_steps, point_s, parts, self.opening)
        stopped = [request_id for request_id in stopped if request_id not in failures]
        return StepResults({}, {}, failures, step, stopped=stopped)


@dataclasses.dataclass(slots=True)
class RefusedDelivery:
    others: Delivery | None
    failures: dict[str, Failure]

    def results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults:
        results = StepResults({}, {}, {}) if self.others is None else self.others.results(sampled, order)
        results.failures.update(self.failures)
        return results


def _stopped(slices: Sequence[ReadSlice], parts: Sequence[torch.Tensor]) -> list[str]:
    return [
        piece.request.request_id
        for piece in slices
        if piece.active.op.kind is OperationKind.STOP and bool(parts[0][piece.start : piece.stop].any())
    ]


def _overflow_failures(overflows: Sequence[Flags], num_kept: Mapping[str, int]) -> dict[str, Failure]:
    found: dict[str, Failure] = {}
    for segments, flags in overflows:
        found |= overflow_failures(segments, flags.numpy(), num_kept)
    return found


def _undelivered(error: Exception) -> Failure:
    return Failure("intervention_failed", f"results could not be collected: {error}")


def host_view(host: torch.Tensor) -> npt.NDArray[np.generic]:
    """Return a tensor's content, as integers if numpy lacks its dtype."""
    if host.dtype is torch.bfloat16:
        host = host.view(torch.int16)
    array: npt.NDArray[np.generic] = host.numpy()
    return array


def _pattern_record(
    pattern: PatternRead, part: torch.Tensor, masks: list[npt.NDArray[np.bool_]]
) -> StepRecord | None:
    """Return the record of attention patterns ``[sites, rows, heads, keys]``; None if no row is delivered."""
    view, positions = host_view(part), pattern.positions
    if pattern.mask is not None:
        named = np.flatnonzero(masks[pattern.mask])
        if pattern.active.op.reduce == "last":
            named = named[-1:]
        if not len(named):
            return None
        positions = [positions[row] for row in named]
        view = view[:, named, :, : positions[-1] + 1]
    return StepRecord(pattern.active.index, positions, [view.tobytes()])
