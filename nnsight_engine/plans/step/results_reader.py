"""Converts a step's buffers to the records of its requests.

Works in two phases. ``collect``, before sampling, starts the copy of the read values to the host, which
sampling synchronizes with anyway; lens projections happen there, batched over layers and requests, outside
the compiled step. ``read_step``, after sampling, copies each request's slices to bytes, so that no
request holds memory that belongs to other requests. In a run the values of all requests are sent
whole, and are split where they wait to be sent (``shared_run``).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.records import RunGroup, RunOpening, RunStep, StepRecord, StepResults
from nnsight_engine.plans.request_plan import OperationKind
from nnsight_engine.plans.step.active import ActiveOp, ActiveRequest
from nnsight_engine.plans.step.host_arena import HostArena
from nnsight_engine.plans.step.lens import LensReader
from nnsight_engine.plans.step.plan import ReadGroup, ReadSlice, StepPlan
from nnsight_engine.plans.step.steady_run import SteadyRun

logger = logging.getLogger(__name__)

LENS_CHUNK_ROWS = 128
"""Rows projected to the vocabulary at once, which limits the scratch memory of a lens."""

LensLogits = Callable[[torch.Tensor], torch.Tensor | None]
"""Maps residual stream ``[rows, hidden]`` to logits ``[rows, vocabulary]``; None on a rank without them."""


class StepResultsReader:
    """Creates records from executed step plans.

    Args:
        lens_logits: Final norm and unembedding of the model.
        arena: Destination of the values that were read; None if they are on the host already.
    """

    def __init__(self, lens_logits: LensLogits, arena: HostArena | None) -> None:
        self._lens_logits = lens_logits
        self._lens_reader = LensReader()
        self._arena = arena

    def collect(self, plan: StepPlan) -> None:
        """Start copying the values that an executed plan has read to the host; does not wait for them."""
        begin = time.monotonic()
        for group in plan.reads:
            group.parts = []
            try:
                group.parts = self._parts(group)
            except Exception as error:
                logger.exception("a group of reads could not be collected")
                for piece in group.slices:
                    piece.request.fail("intervention_failed", f"results could not be collected: {error}")
        for pattern in plan.patterns:
            pattern.part = pattern.out
        if self._arena is not None:
            self._start_copy(plan, self._arena)
        plan.spent_s += time.monotonic() - begin

    def _start_copy(self, plan: StepPlan, arena: HostArena) -> None:
        parts = [part for group in plan.reads for part in group.parts or ()]
        host = iter(arena.start_copy([*parts, *(pattern.out for pattern in plan.patterns)]))
        for group in plan.reads:
            group.parts = [next(host) for _ in group.parts or ()]
        for pattern in plan.patterns:
            pattern.part = next(host)

    def _wait(self) -> None:
        if self._arena is not None:
            self._arena.wait()

    def _parts(self, group: ReadGroup) -> list[torch.Tensor]:
        """Return the content of a group's records on the device, each ``[rows, sites, …]``."""
        op = group.slices[0].active.op
        if op.kind is OperationKind.LENS:
            return self._lens(group.buffers[0], op.top_k, op.targets)
        return group.buffers

    def read_step(
        self, plan: StepPlan, sampled: Sequence[Sequence[int]], order: dict[str, int]
    ) -> StepResults:
        """Return the records of the step for every request, and advance the requests' positions.

        Args:
            plan: The plan, executed and collected.
            sampled: Sampled token ids by row of the batch, empty for an incomplete prompt.
            order: Row of the batch for each request id.
        """
        begin = time.monotonic()
        self._wait()
        records: dict[str, list[StepRecord]] = defaultdict(list)
        for group in plan.reads:
            try:
                self._read_group(group, plan, records)
            except Exception as error:
                logger.exception("a group of reads could not be collected from the run")
                for piece in group.slices:
                    piece.request.fail("intervention_failed", f"results could not be collected: {error}")
        for pattern in plan.patterns:
            part = _host_view(pattern.part).tobytes()
            record = StepRecord(pattern.active.index, pattern.positions, [part])
            records[pattern.request.request_id].append(record)
        for request, active in plan.samples:
            ids = sampled[order[request.request_id]] if sampled else []
            if ids:
                position = plan.spans[request.request_id].stop - 1
                data = np.asarray(ids[:1], np.int64).tobytes()
                records[request.request_id].append(StepRecord(active.index, [position], [data]))
        plan.share_time(time.monotonic() - begin)
        plan.is_unreported = False
        failures = {}
        for request_id, span in plan.spans.items():
            _advance(span.request, span.start, span.stop)
            if span.request.failure is not None:
                failures[request_id] = span.request.failure
                records.pop(request_id, None)
        infos = {request_id: span.request.info() for request_id, span in plan.spans.items()}
        return StepResults(dict(records), infos, failures)

    def read_run(
        self, run: SteadyRun, sampled: Sequence[Sequence[int]], order: dict[str, int]
    ) -> StepResults:
        """Return the results of a run's step for all its requests together.

        Raises if anything is inconsistent.

        Args:
            run: The run, its step executed and collected.
            sampled: Sampled token ids by row of the batch; empty on ranks whose results are not used.
            order: Row of the batch for each request id.
        """
        begin = time.monotonic()
        self._wait()
        plan = run.plan
        parts = [[part.tobytes() for part in _host_views(group)] for group in plan.reads]
        for _, captures in _samples(plan):
            ids = [sampled[order[request.request_id]][0] for request, _ in captures] if sampled else []
            parts.append([np.asarray(ids, np.int64).tobytes()])
        opening = _opening(plan) if run.num_steps == 1 else None
        run.count(time.monotonic() - begin)
        return StepResults({}, {}, {}, RunStep(run.num_steps, run.point_s, parts, opening))

    def _read_group(self, group: ReadGroup, plan: StepPlan, records: dict[str, list[StepRecord]]) -> None:
        parts = _host_views(group)
        for piece in group.slices:
            span = plan.spans[piece.request.request_id]
            positions = (piece.offsets + span.start).tolist()
            data = [_own_bytes(part, piece) for part in parts]
            records[piece.request.request_id].append(StepRecord(piece.active.index, positions, data))

    def _lens(self, residual: torch.Tensor, top_k: int, targets: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the tensors of ``LensReader.read``, each ``[rows, sites, …]``; empty without logits."""
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


def _samples(plan: StepPlan) -> list[tuple[str, list[tuple[ActiveRequest, ActiveOp]]]]:
    """Return the captures of sampled ids, grouped by reduction."""
    groups: dict[str, list[tuple[ActiveRequest, ActiveOp]]] = {}
    for request, active in plan.samples:
        groups.setdefault(active.op.reduce, []).append((request, active))
    return list(groups.items())


def _opening(plan: StepPlan) -> RunOpening:
    """Return the participants of a run of a plan and their reads."""
    reads = [
        RunGroup(
            group.slices[0].active.op.reduce,
            [(piece.request.request_id, piece.active.index) for piece in group.slices],
        )
        for group in plan.reads
    ]
    samples = [
        RunGroup(reduce, [(request.request_id, active.index) for request, active in captures])
        for reduce, captures in _samples(plan)
    ]
    return RunOpening(list(plan.spans), [*reads, *samples])


def _host_views(group: ReadGroup) -> list[npt.NDArray[np.generic]]:
    if group.parts is None:
        raise RuntimeError("the reads of this step were never collected")
    return [_host_view(part) for part in group.parts]


def _host_view(host: torch.Tensor | None) -> npt.NDArray[np.generic]:
    """Return a tensor's content, as integers if numpy lacks its dtype."""
    if host is None:
        raise RuntimeError("the reads of this step were never collected")
    if host.dtype is torch.bfloat16:
        host = host.view(torch.int16)
    array: npt.NDArray[np.generic] = host.numpy()
    return array


def _own_bytes(part: npt.NDArray[Any], piece: ReadSlice) -> bytes:
    """Return one request's rows of a part ``[rows, sites, …]``, reduced as requested."""
    own = part[piece.start : piece.stop]
    if piece.active.op.reduce == "mean":
        # The buffer of a mean is float32, whatever dtype it is returned in.
        own = own.sum(axis=0, dtype=np.float32)
    elif piece.active.op.reduce == "last":
        own = own[-1]
    data: bytes = own.tobytes()
    return data


def _advance(request: ActiveRequest, start: int, stop: int) -> None:
    if request.first_position < 0:
        request.first_position = start
        request.end_position = start
    request.recomputed_tokens += max(0, min(request.end_position, stop) - start)
    request.end_position = max(request.end_position, stop)
