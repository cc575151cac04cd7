"""Results of an executed step on their way to the scheduler.

They are needed when the sampled tokens are known, which may be while a later step runs, on another thread. So
a delivery has its own record of all that they consist of, and nothing is planned from it. ``collect`` starts
the copies to the host before sampling, with lens projections batched over layers and requests.

Lenses are in float32, whatever dtype the model uses. Float32 copies over the whole vocabulary are large, and
on a CPU page faults on fresh memory cost more than the arithmetic: so a few rows at a time are computed in
two buffers that are reused.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.records import (
    DraftedRows,
    Failure,
    StepInfo,
    StepRecord,
    StepResults,
    StreakGroup,
    StreakOpening,
    StreakStep,
    reduced_rows,
)
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.host_arena import HostArena, HostCopy, to_device
from nnsight_engine.plans.step.plan import (
    FlaggedRows,
    Overflows,
    PatternRead,
    PlannedSample,
    ReadGroup,
    ReadSlice,
    StepPlan,
    Streak,
    overflow_failures,
)

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
    flagged_rows: list[FlaggedRows]
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
        """Return the results; what cannot be delivered fails its own requests only."""
        started_s = time.monotonic()
        drafted = {
            request_id: DraftedRows(
                participant.start, participant.stop - participant.start, participant.num_drafts
            )
            for request_id, participant in self.participants.items()
            if participant.has_drafts
        }
        num_kept = {
            request_id: rows.num_kept(len(sampled[order[request_id]]) if sampled else 0)
            for request_id, rows in drafted.items()
        }
        records: dict[str, list[StepRecord]] = defaultdict(list)
        stopped: list[str] = []
        failures = {
            key: participant.failure
            for key, participant in self.participants.items()
            if participant.failure is not None
        }
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
        self._add_samples(sampled, order, masks, records)
        for request_id in failures:
            records.pop(request_id, None)
        stopped = [request_id for request_id in stopped if request_id not in failures]
        self._share_time(time.monotonic() - started_s)
        infos = {request_id: participant.info for request_id, participant in self.participants.items()}
        return StepResults(dict(records), infos, failures, stopped=stopped, drafted=drafted)

    def _read(
        self,
        read: ReadRows,
        mask: npt.NDArray[np.bool_] | None,
        num_kept: Mapping[str, int],
        records: dict[str, list[StepRecord]],
    ) -> None:
        """Add the records of a group of reads; refused drafts (``num_kept``) and masked rows are left out."""
        views = [host_view(part) for part in read.parts]
        for piece in read.slices:
            request_id = piece.request.request_id
            new = slice(piece.start + piece.num_delivered, piece.stop)
            offsets = piece.offsets[piece.num_delivered :]
            if not len(offsets):
                continue
            parts = [view[new] for view in views]
            first = self.participants[request_id].start if piece.first is None else piece.first
            positions = offsets + first
            # Rows that are reduced here cannot be taken out again.
            reduce = "none" if request_id in num_kept else piece.active.op.reduce
            is_delivered = None if mask is None else mask[new]
            if request_id in num_kept:
                is_kept = offsets < num_kept[request_id]
                is_delivered = is_kept if is_delivered is None else is_delivered & is_kept
            if is_delivered is not None:
                rows = np.flatnonzero(is_delivered)[-1:] if reduce == "last" else np.flatnonzero(is_delivered)
                if not len(rows):
                    continue
                parts, positions = [part[rows] for part in parts], positions[rows]
            data = [reduced_rows(part, reduce).tobytes() for part in parts]
            records[request_id].append(StepRecord(piece.active.index, positions.tolist(), data))

    def _add_samples(
        self,
        sampled: SampledIds,
        order: dict[str, int],
        masks: Sequence[npt.NDArray[np.bool_]],
        records: dict[str, list[StepRecord]],
    ) -> None:
        """Add the records of captured sampled ids, of as many steps as have yielded a token."""
        for request, active, mask, steps in self.samples:
            ids = sampled[order[request.request_id]] if sampled else []
            known_steps = [step for step in steps if step < len(ids)]
            if known_steps and (mask is None or masks[mask][0]):
                participant = self.participants[request.request_id]
                first = participant.stop - 1 - participant.num_drafts
                data = np.asarray([ids[step] for step in known_steps], np.int64).tobytes()
                positions = [first + step for step in known_steps]
                records[request.request_id].append(StepRecord(active.index, positions, [data]))

    def _share_time(self, seconds: float) -> None:
        """Divide the time that delivering has taken among the requests, by rows times points."""
        per_work = seconds / max(1, sum(participant.work for participant in self.participants.values()))
        for participant in self.participants.values():
            participant.request.delivery_s += participant.work * per_work
            participant.info.spent_s += participant.work * per_work


@dataclasses.dataclass(slots=True)
class StreakDelivery:
    """Results of a step of a streak, for all its requests together; see ``StreakStep``."""

    copy: HostCopy
    streak: Streak
    num_steps: int
    point_s: float
    reads: list[list[torch.Tensor]]
    samples: list[list[str]]
    overflows: list[Flags]
    opening: StreakOpening | None

    def results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults:
        try:
            return self._results(sampled, order)
        except Exception as error:
            logger.exception("a step of a streak could not be delivered")
            return StepResults({}, {}, dict.fromkeys(self.streak.plan.spans, _undelivered(error)))

    def _results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults:
        """Return the results: of each group of reads, then of each group of samples, see ``StreakStep``."""
        started_s = time.monotonic()
        stopped: list[str] = []
        with self.copy.arrived():
            parts = [[host_view(part).tobytes() for part in group] for group in self.reads]
            failures = _overflow_failures(self.overflows, {})
            for group, tensors in zip(self.streak.plan.reads, self.reads, strict=True):
                stopped += _stopped(group.slices, tensors)
        for request_ids in self.samples:
            ids = [sampled[order[request_id]][0] for request_id in request_ids] if sampled else []
            parts.append([np.asarray(ids, np.int64).tobytes()])
        self.streak.note_delivery(time.monotonic() - started_s)
        point_s = self.point_s + self.streak.delivery_point_s
        step = StreakStep(self.num_steps, point_s, parts, self.opening)
        stopped = [request_id for request_id in stopped if request_id not in failures]
        return StepResults({}, {}, failures, step, stopped=stopped)


@dataclasses.dataclass(slots=True)
class RefusedDelivery:
    """Results of a step from which requests were excluded: they fail; ``others`` has those of the rest."""

    others: Delivery | None
    failures: dict[str, Failure]

    def results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults:
        results = StepResults({}, {}, {}) if self.others is None else self.others.results(sampled, order)
        results.failures.update(self.failures)
        return results


def _stopped(slices: Sequence[ReadSlice], parts: Sequence[torch.Tensor]) -> list[str]:
    """Return the requests with a ``stop`` that holds at one of its rows; its gate is the only part."""
    return [
        piece.request.request_id
        for piece in slices
        if piece.active.op.kind is OperationKind.STOP and bool(parts[0][piece.start : piece.stop].any())
    ]


def _overflow_failures(overflows: Sequence[Flags], num_kept: Mapping[str, int]) -> dict[str, Failure]:
    """Return the failures of requests with a change beyond float16, see ``Overflows``."""
    failures: dict[str, Failure] = {}
    for flagged_rows, flags in overflows:
        failures |= overflow_failures(flagged_rows, flags.numpy(), num_kept)
    return failures


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
        rows = np.flatnonzero(masks[pattern.mask])
        if pattern.active.op.reduce == "last":
            rows = rows[-1:]
        if not len(rows):
            return None
        positions = [positions[row] for row in rows]
        view = view[:, rows, :, : positions[-1] + 1]
    return StepRecord(pattern.active.index, positions, [view.tobytes()])


ROWS_AT_ONCE: Final = 16
"""Number of rows in the buffers: some MB, near the size of a processor's caches."""


class LensReader:
    """Reads lenses out of logits, a few rows at a time in buffers that are reused."""

    def __init__(self) -> None:
        self._wide = torch.empty(0)
        self._logprobs = torch.empty(0)

    def read(self, logits: torch.Tensor, top_k: int, targets: Sequence[int]) -> list[torch.Tensor]:
        """Return ids and log-probabilities of the likeliest, then log-probabilities and ranks of the targets.

        ``logits`` are ``[rows, vocabulary]``; the results ``[rows, …]``, int32 and float32.
        """
        with torch.inference_mode():
            self._fit(logits)
            index = to_device(np.asarray(targets, np.int64), logits.device)
            parts = [self._read(rows, top_k, index) for rows in logits.split(ROWS_AT_ONCE)]
            return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _fit(self, logits: torch.Tensor) -> None:
        shape = (ROWS_AT_ONCE, logits.shape[1])
        if self._wide.shape != shape or self._wide.device != logits.device:
            self._wide = torch.empty(shape, dtype=torch.float32, device=logits.device)
            self._logprobs = torch.empty_like(self._wide)

    def _read(self, logits: torch.Tensor, top_k: int, targets: torch.Tensor) -> list[torch.Tensor]:
        """Return the same for at most ``ROWS_AT_ONCE`` rows; the results do not alias the buffers."""
        wide, logprobs = self._wide[: len(logits)], self._logprobs[: len(logits)]
        wide.copy_(logits)
        torch.log_softmax(wide, dim=-1, out=logprobs)
        top = logprobs.topk(top_k, dim=-1)
        of_targets = logprobs.index_select(-1, targets)
        ranks = [(logprobs > logprob.unsqueeze(-1)).sum(dim=-1) + 1 for logprob in of_targets.unbind(-1)]
        rank = torch.stack(ranks, dim=-1) if ranks else torch.empty_like(of_targets)
        return [top.indices.to(torch.int32), top.values, of_targets, rank.to(torch.int32)]


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
        started_s = time.monotonic()
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
        sources += [overflow.flags for overflow in _overflows(plan)]
        plan.copy = HostCopy(sources) if self._arena is None else self._arena.start_copy(sources)
        plan.spent_s += time.monotonic() - started_s

    def _parts(self, group: ReadGroup) -> list[torch.Tensor]:
        """Return the tensors of a group's records, see ``StepRecord``; lenses are projected only here."""
        op = group.slices[0].active.op
        if op.kind is OperationKind.LENS:
            return self._lens(group.buffers[0], op.top_k, op.targets)
        return group.buffers

    def _computed(self, plan: StepPlan) -> dict[int, list[torch.Tensor]]:
        """Return the parts of groups by their ``id``; what fails together is computed for each group."""
        computed: dict[int, list[torch.Tensor]] = {}
        waiting = list(plan.computed)
        while waiting:
            reads = waiting.pop()
            try:
                computed |= reads.read()
            except Exception as error:
                logger.exception("features could not be computed")
                if len(reads.groups) > 1:
                    waiting += reads.alone()
                    continue
                (group,) = reads.groups
                for piece in group.slices:
                    piece.request.fail("intervention_failed", f"features could not be computed: {error}")
                computed[id(group)] = []
        return computed

    def _lens(self, residual: torch.Tensor, top_k: int, targets: tuple[int, ...]) -> list[torch.Tensor]:
        """Return a lens's parts, of ``[rows, sites, hidden]``; none on a rank without the logits."""
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


def streak_delivery(streak: Streak) -> StreakDelivery:
    """Return the delivery of a step of a streak; the first one also says who takes part."""
    plan = streak.plan
    copy, reads, flags = _taken(plan)
    streak.count_time()
    samples = [[sample.request.request_id for sample in captures] for _, captures in _samples(plan)]
    opening = _opening(plan) if streak.num_steps == 1 else None
    return StreakDelivery(
        copy, streak, streak.num_steps, streak.point_s, reads, samples, _flagged(plan, flags), opening
    )


def _taken(plan: StepPlan) -> tuple[HostCopy, list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return a plan's copy, its parts for each group of reads, and the rest in the order of ``collect``."""
    copy = plan.copy
    if copy is None:
        raise RuntimeError("the reads of this step were never collected")
    values = iter(copy.values)
    reads = [[next(values) for _ in range(group.num_parts)] for group in plan.reads]
    return copy, reads, list(values)


def _overflows(plan: StepPlan) -> list[Overflows]:
    return plan.overflows + plan.overflows_before


def _flagged(plan: StepPlan, flags: list[torch.Tensor]) -> list[Flags]:
    return [
        Flags(overflow.flagged_rows, host) for overflow, host in zip(_overflows(plan), flags, strict=True)
    ]


def _samples(plan: StepPlan) -> list[tuple[str, list[PlannedSample]]]:
    """Group the captures of sampled ids by reduction: in a streak each group is stored together."""
    groups: dict[str, list[PlannedSample]] = {}
    for sample in plan.samples:
        groups.setdefault(sample.active.op.reduce, []).append(sample)
    return list(groups.items())


def _opening(plan: StepPlan) -> StreakOpening:
    """Return which request and operation each row of a streak's parts belongs to."""
    reads = [
        StreakGroup(
            group.slices[0].active.op.reduce,
            [(piece.request.request_id, piece.active.index) for piece in group.slices],
        )
        for group in plan.reads
    ]
    samples = [
        StreakGroup(reduce, [(sample.request.request_id, sample.active.index) for sample in captures])
        for reduce, captures in _samples(plan)
    ]
    return StreakOpening(list(plan.spans), [*reads, *samples])
