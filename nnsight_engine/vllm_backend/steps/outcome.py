"""What a step with interventions sends: results and reports with its output, or to the next pipeline stage.

Between stages, results are in two more entries of vLLM's tensors. They are taken out before vLLM's runner
sees the dictionary, since it expects its own entries only.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from nnsight_engine.core.work_context import EngineCounts
from nnsight_engine.plans.records import StepResults
from nnsight_engine.plans.step.delivery import Delivery, SampledIds
from nnsight_engine.plans.step.stage_results import StageResults
from nnsight_engine.vllm_backend.compat import attach_results
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.steps.dataset_sinks import DatasetSinks


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """Everything that a step with interventions leaves to be sent; made on the thread that runs steps."""

    delivery: Delivery | None
    reported: StepResults | None
    spent_s: float | None
    counts: EngineCounts
    datasets: DatasetSinks | None = None

    def results(self, sampled: SampledIds, order: dict[str, int]) -> StepResults | None:
        """Return the step's results, None if there are none. Any thread may call this, once."""
        begin = time.monotonic()
        results = self.reported
        if self.delivery is not None:
            results = self.delivery.results(sampled, order)
            if self.reported is not None:
                results.add_reports(self.reported)
            if self.datasets is not None:
                self.datasets.take(results)
        if self.spent_s is not None:
            self.counts.note_time(self.spent_s + time.monotonic() - begin)
        return results


class InterventionOutput(AsyncModelRunnerOutput):
    """A runner's output, whose copy may be under way, with the results of the step's interventions."""

    def __init__(self, output: AsyncModelRunnerOutput, outcome: StepOutcome) -> None:
        self._output = output
        self._outcome = outcome

    def get_output(self) -> ModelRunnerOutput:
        return _with_results(self._output.get_output(), self._outcome)


def with_outcome(output: Any, outcome: StepOutcome) -> Any:
    """Return a runner's output with the step's results, which are attached once its tokens are there."""
    if isinstance(output, AsyncModelRunnerOutput):
        return InterventionOutput(output, outcome)
    return output if output is None else _with_results(output, outcome)


def _with_results(output: ModelRunnerOutput, outcome: StepOutcome) -> ModelRunnerOutput:
    """Attach the step's results to its output."""
    results = outcome.results(output.sampled_token_ids or [], output.req_id_to_index or {})
    attached: ModelRunnerOutput = output if results is None else attach_results(output, results)
    return attached


_HEAD: Final = "nnsight_engine_head"
_VALUES: Final = "nnsight_engine_values"
_ALIGNMENT: Final = 16


class Description(msgspec.Struct, array_like=True):
    """The results of a stage without its tensors, and the dtype and shape of each of these."""

    results: StageResults
    tensors: list[tuple[str, tuple[int, ...]]]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[Description])


def with_results(output: IntermediateTensors, of_stages: Sequence[StageResults]) -> IntermediateTensors:
    """Return an early stage's tensors for the next one, with the results of all stages so far."""
    described = [
        Description(
            dataclasses.replace(stage_results, tensors=[]),
            [
                (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for tensor in stage_results.tensors
            ],
        )
        for stage_results in of_stages
    ]
    tensors = [tensor for stage_results in of_stages for tensor in stage_results.tensors]
    # A new object: with CUDA graphs, the output of all steps is the same one. Tensors only, and few: vLLM
    # transfers no more on a CPU.
    head = torch.frombuffer(bytearray(_ENCODER.encode(described)), dtype=torch.uint8)
    added = {_HEAD: head, _VALUES: _joined(tensors)} if tensors else {_HEAD: head}
    return IntermediateTensors({**output.tensors, **added})


def take_results(received: IntermediateTensors | None) -> list[StageResults]:
    """Remove and return the results that ``with_results`` has added; none on the first stage."""
    head = None if received is None else received.tensors.pop(_HEAD, None)
    if received is None or head is None:
        return []
    values, start, taken = received.tensors.pop(_VALUES, None), 0, []
    for described in _DECODER.decode(head.numpy().tobytes()):
        for name, shape in described.tensors:
            dtype: torch.dtype = getattr(torch, name)
            stop = start + math.prod(shape) * dtype.itemsize
            described.results.tensors.append(values[start:stop].view(dtype).view(shape))
            start = _aligned(stop)
        taken.append(described.results)
    return taken


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of all tensors in one, each from an aligned place on."""
    num_bytes = sum(_aligned(tensor.numel() * tensor.itemsize) for tensor in tensors)
    joined = torch.empty(num_bytes, dtype=torch.uint8, device=tensors[0].device)
    start = 0
    for tensor in tensors:
        stop = start + tensor.numel() * tensor.itemsize
        joined[start:stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start = _aligned(stop)
    return joined


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_IDLE_S: Final = 0.02
"""Seconds that a step without tokens waits for blocks; new requests may arrive meanwhile."""


class TraceReports:
    """Ends steps for traces, and reports what the scheduler has to know."""

    def __init__(self, traces: WorkerTraces) -> None:
        self._traces = traces
        self._waiting: frozenset[str] = frozenset()
        self._throttled: frozenset[str] = frozenset()

    @property
    def is_due(self) -> bool:
        """Whether there are traces, or a throttled tenant of which the scheduler must hear again."""
        return bool(not self._traces.idle or self._throttled)

    def end_step(self) -> StepResults | None:
        """End the step for traces; return what is new to the scheduler, None if nothing is."""
        if not self.is_due:
            return None
        traces = self._traces
        undone = list(traces.undone)
        ended, reports = traces.end_step(), traces.reports()
        waiting, throttled = traces.waiting, traces.throttled
        is_known = waiting == self._waiting and throttled == self._throttled
        if is_known and not (ended or reports or undone):
            return None
        self._waiting, self._throttled = waiting, throttled
        return StepResults(
            {}, {}, {}, ended=ended, reports=reports, undone=undone, waiting=waiting, throttled=throttled
        )

    def end_idle_step(self, *, is_alone: bool) -> StepResults | None:
        """End a step without tokens; if it is alone, there is time to wait for blocks. None without news."""
        if not self.is_due:
            return None
        if is_alone:
            self._traces.wait_for_any(_IDLE_S)
        return self.end_step()
