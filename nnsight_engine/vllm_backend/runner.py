"""The model runner with interventions: vLLM's own runner, extended around the phases of a step.

``execute_model`` registers new requests and releases finished ones. ``_model_forward`` runs the model on the
final batch. ``sample_tokens`` turns logits into tokens and attaches the step's results to the output. A step
without interventions runs vLLM's code unchanged in all three.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from nnsight_engine.core.engine_counts import EngineCounts
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tap_choice import NO_TAPS, chosen_taps
from nnsight_engine.plans.records import StepResults
from nnsight_engine.plans.request_plan import PLAN_KEY
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.vllm_backend.compat import (
    EngineLimits,
    attach_results,
    brings,
    describe_model,
    is_single_tenant,
    zero_blocks,
)
from nnsight_engine.vllm_backend.families import resolve_points
from nnsight_engine.vllm_backend.graphs import StepGraphs, cut_at_taps
from nnsight_engine.vllm_backend.hooks import hooked
from nnsight_engine.vllm_backend.replayed_samples import ReplayedSamples
from nnsight_engine.vllm_backend.taps import CONTEXT_KEY, TapStep, install_taps, untapped
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY
from nnsight_engine.vllm_backend.traces.module_order import UntappedError
from nnsight_engine.vllm_backend.traces.peer_traces import PeerTraces
from nnsight_engine.vllm_backend.traces.placement import traces_of_worker
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.stages.links import own_stage
from nnsight_engine.vllm_backend.traces.step_facts import StepFacts
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces
from nnsight_engine.vllm_backend.worker_state import WorkerState

_IDLE_S = 0.02
"""Seconds that a step without tokens waits for blocks; new requests may arrive meanwhile."""


@dataclasses.dataclass(slots=True)
class RunningStep:
    """A step with interventions between its forward pass and the collection of its results."""

    plan: StepPlan
    hidden: Any
    sample_rows: Any


class InterventionRunnerMixin:
    """Mixin that ``worker.py`` puts in front of vLLM's runner class."""

    interventions: WorkerState
    traces: WorkerTraces | PeerTraces
    taps: frozenset[int] = frozenset()
    """The numbers of the taps that are installed."""

    graphs: StepGraphs
    _samples: ReplayedSamples
    counts: EngineCounts
    """Counts of steps by tier, and of sandbox events."""

    _step: RunningStep | None = None
    _scheduled: dict[str, int]
    _num_rows: int
    _spent_s: float = 0.0
    """Seconds for which interventions delayed the running step, as far as they were measured."""

    _reported_waiting: frozenset[str] = frozenset()
    """The waiting requests (those whose blocks have not answered) last reported to the scheduler."""

    _reported_throttled: frozenset[str] = frozenset()
    """The resting tenants last reported to the scheduler."""

    execute_model_state: Any
    intermediate_tensors: Any
    num_prompt_logprobs: dict[str, int]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then install taps in it, before anything is compiled."""
        config = self.vllm_config  # type: ignore[attr-defined]
        limits = EngineLimits.read(config)
        has_taps = limits.taps != NO_TAPS and config.parallel_config.pipeline_parallel_size == 1
        self.graphs = StepGraphs(is_cut=has_taps and cut_at_taps(config.compilation_config))
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        model = self.get_model()  # type: ignore[attr-defined]
        points = resolve_points(
            model,
            config.model_config.hf_text_config,
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        )
        spec = describe_model(points, config, limits)
        if has_taps:  # a pipeline of several stages has no taps and supports traces only
            self.taps = chosen_taps(limits.taps, len(points.layers))
            install_taps(points.layers, points.family.hidden_index, self.taps)
        self.counts = EngineCounts()
        self._samples = ReplayedSamples()
        self._make_room_for_stages(config)
        self.traces = traces_of_worker(points, config, limits)
        self.interventions = WorkerState(
            points,
            spec,
            self.device,  # type: ignore[attr-defined]
            max_request_bytes=limits.max_capture_bytes_per_request,
            max_engine_bytes=limits.max_capture_bytes_engine,
        )

    def _make_room_for_stages(self, config: Any) -> None:
        """Allocate the buffers for tensors from earlier stages, which vLLM never does on a CPU.

        Elsewhere vLLM allocates them while it profiles.
        """
        if own_stage() > 0 and self.intermediate_tensors is None:
            self.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(  # type: ignore[attr-defined]
                batch_size=self.max_num_tokens,  # type: ignore[attr-defined]
                dtype=config.model_config.dtype,
                device=self.device,  # type: ignore[attr-defined]
            )

    @property
    def runs_blocks(self) -> bool:
        """Whether the blocks of traces run on this worker; of several ranks or stages, they run on one."""
        return self.traces.runs_blocks

    def serve_stages(self, scheduler_output: Any) -> None:
        """Serve values of earlier stages to blocks, if this is the last of several pipeline stages."""
        if self.traces.serves_stages:
            self.traces.before(self._facts(scheduler_output, _arrived(scheduler_output, TRACE_KEY)))

    def _facts(self, scheduler_output: Any, traced: Sequence[tuple[str, Any]]) -> StepFacts:
        """Return the facts about a step, given its new traced requests."""
        # A step cannot be undone for requests whose values operations have already read, and for those whose
        # prompt logprobs vLLM returns only once, unless it is undone before they are computed.
        new = [
            request.req_id
            for request in scheduler_output.scheduled_new_reqs
            if request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None
        ]
        return StepFacts(
            traced,
            scheduler_output.finished_req_ids,
            scheduler_output.num_scheduled_tokens,
            is_single_tenant(scheduler_output),
            set(self.interventions.live),
            {*self.num_prompt_logprobs, *new},
        )

    @property
    def model_spec(self) -> ModelSpec:
        """The loaded model's description."""
        return self.interventions.spec

    @property
    def trace_spec(self) -> ModelSpec:
        """The model's description for traces; includes the leaves that are sharded over ranks."""
        leaves = self.interventions.points.leaf_specs(wholes=True)
        return dataclasses.replace(self.model_spec, leaves=leaves)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Register new requests, release finished ones, then run the step."""
        finished = scheduler_output.finished_req_ids
        planned, traced = _arrived(scheduler_output, PLAN_KEY), _arrived(scheduler_output, TRACE_KEY)
        self.interventions.begin(planned, finished)
        self._step = None
        self._scheduled = scheduler_output.num_scheduled_tokens
        self._num_rows = scheduler_output.total_num_scheduled_tokens
        if traced or not self.traces.idle or self._reported_throttled:
            self.traces.begin(self._facts(scheduler_output, traced))
        self._samples.forget(finished)
        self.graphs.begin((name for name, _ in (*planned, *traced)), finished, self._scheduled)
        try:
            output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.graphs.end()
        return output if self._num_rows else self._idle(output)

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        if self.device.type == "cpu":  # type: ignore[attr-defined] # an attribute of vLLM's runner
            zero_blocks(self, block_ids)
        else:
            super()._zero_block_ids(block_ids)  # type: ignore[misc]

    def _idle(self, output: Any) -> Any:
        """Wait briefly for blocks in a step without tokens, and return the output with their results."""
        if self.traces.idle and not self._reported_throttled:
            return output
        self.traces.wait_for_any(_IDLE_S)
        results = self._with_blocks(self.traces, None)
        return output if results is None else attach_results(output, results)

    def _determine_batch_execution_and_padding(self, **options: Any) -> Any:
        decide = super()._determine_batch_execution_and_padding  # type: ignore[misc]
        return self.graphs.choose(decide, options)

    def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        plan = None if self.interventions.idle else self._timed_plan()
        traced = not self.traces.idle and self._begin_traced_step(input_ids, kwargs)
        if plan is None and not traced:
            self.counts.steps["plain"] += 1
            return super()._model_forward(input_ids, *args, **kwargs)  # type: ignore[misc]
        forward = functools.partial(super()._model_forward, input_ids, *args, **kwargs)  # type: ignore[misc]
        context = get_forward_context()
        step = TapStep(plan, self.traces.dispatcher if traced else None)
        context.additional_kwargs[CONTEXT_KEY] = step
        with contextlib.ExitStack() as stack:
            missing = set() if plan is None else plan.taps() - self.taps
            if plan is not None and (missing or plan.hook_sites()):
                _call_modules(context)
                points = self.interventions.points
                stack.enter_context(hooked(points, plan, step.is_models_own))
                stack.enter_context(untapped(points.layers, points.family.hidden_index, missing, step))
            hidden = forward() if not traced else self._traced_forward(forward, input_ids, context)
        self._note_tier(plan, is_uncompiled=context.skip_compiled)
        if plan is not None:
            self.interventions.on_hidden(plan, hidden)
            self._step = RunningStep(plan, hidden, self._sample_rows() if len(plan.logits_rows) else None)
        return hidden

    def _note_tier(self, plan: StepPlan | None, *, is_uncompiled: bool) -> None:
        """Record on which tier a step with interventions ran, for all its requests."""
        self.counts.steps["eager" if is_uncompiled else "tap"] += 1
        self.traces.dispatcher.is_uncompiled = is_uncompiled
        if plan is not None and is_uncompiled:
            plan.record_uncompiled()

    def _traced_forward(self, forward: Callable[[], Any], input_ids: Any, context: Any) -> Any:
        """Run the model with blocks; again uncompiled if the blocks request more than the taps provide."""
        traces = self.traces
        # The model changes input embeddings in place, so a step with embeddings cannot be run a second time.
        if isinstance(traces, WorkerTraces) and traces.by_taps and input_ids is not None:
            try:
                with traces.tapped():
                    return forward()
            except UntappedError:
                traces.again()
        _call_modules(context)
        with traces.running():
            return forward()

    def learn_route(self) -> None:
        """Enable serving blocks at the taps, if a step can be run twice and there is only one worker."""
        config, traces = self.vllm_config, self.traces  # type: ignore[attr-defined]
        if (
            not isinstance(traces, WorkerTraces)
            or config.parallel_config.world_size > 1
            or config.model_config.has_inner_state  # a second run would advance the state again
            or not self.taps
        ):
            return
        model = self.get_model()  # type: ignore[attr-defined]
        handle = model.register_forward_pre_hook(_uncompiled)
        try:
            run = functools.partial(self._dummy_run, 1, cudagraph_runtime_mode=CUDAGraphMode.NONE)  # type: ignore[attr-defined]
            traces.learn_route(run, self.taps)
        finally:
            handle.remove()

    def _begin_traced_step(self, input_ids: Any, kwargs: dict[str, Any]) -> bool:
        spans = []
        for index, request_id, row, num_rows, start in self._rows():
            if self.traces.takes_part(request_id):
                known = self.requests[request_id].num_tokens  # type: ignore[attr-defined]
                spans.append(
                    TraceSpan(request_id, index, row, num_rows, start, complete=start + num_rows >= known)
                )
        tokens = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        return self.traces.step(spans, int(tokens.shape[0]))

    def _timed_plan(self) -> StepPlan | None:
        begin = time.monotonic()
        plan = self._plan_step()
        self._spent_s = time.monotonic() - begin
        return plan

    def _plan_step(self) -> StepPlan | None:
        batch = self.input_batch  # type: ignore[attr-defined]
        request_ids = batch.req_ids
        positions = batch.num_computed_tokens_cpu[: len(request_ids)]
        # A steady run has one row per request, so its rows need no counting.
        if self._has_one_row_each and (plan := self.interventions.go_on(request_ids, positions)) is not None:
            return plan
        spans = []
        for index, request_id, row, num_rows, start in self._rows():
            span = self.interventions.span(request_id, row, num_rows, start, batch.token_ids_cpu[index])
            if span is not None:
                spans.append(span)
        plan = self.interventions.plan(spans)
        if self._has_one_row_each:
            self.interventions.may_go_on(plan, request_ids, positions)
        return plan

    @property
    def _has_one_row_each(self) -> bool:
        """Whether each request of the step has one row: it decodes, or computes its prompt's last token."""
        return self._num_rows == len(self.input_batch.req_ids)  # type: ignore[attr-defined]

    def _rows(self) -> Iterator[tuple[int, str, int, int, int]]:
        """Yield each request's batch index, id, first row, number of rows, and the first row's position."""
        batch = self.input_batch  # type: ignore[attr-defined]
        row = 0
        for index, request_id in enumerate(batch.req_ids):
            num_rows = self._scheduled[request_id]
            yield index, request_id, row, num_rows, int(batch.num_computed_tokens_cpu[index])
            row += num_rows

    def _sample_rows(self) -> Any:
        batch = self.input_batch  # type: ignore[attr-defined]
        if self._has_one_row_each:
            return np.arange(self._num_rows, dtype=np.int64)
        counts = [self._scheduled[request_id] for request_id in batch.req_ids]
        return np.cumsum(np.asarray(counts, np.int64)) - 1

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Run the operations at the logits, sample, and attach the step's results to the output."""
        step, self._step = self._step, None
        state = self.execute_model_state
        # A rank without logits skips this; the results that are returned are those of the rank with logits.
        if step is not None and _has_logits(state):
            self.interventions.on_logits(
                step.plan,
                step.hidden,
                state.logits,
                step.sample_rows,
                self.get_model().compute_logits,  # type: ignore[attr-defined]
            )
        if step is not None:
            self.interventions.collect(step.plan)
        if self.traces.in_step and _has_logits(state):
            self.execute_model_state = state._replace(logits=self.traces.on_logits(state.logits))
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        sampled_at = time.monotonic()
        # Read before ``finish``, which distributes the plan's time over its requests and resets it.
        spent_s = 0.0 if step is None else self._spent_s + step.plan.spent_s
        results: StepResults | None = self.interventions.finish(
            None if step is None else step.plan,
            getattr(output, "sampled_token_ids", None) or [],
            getattr(output, "req_id_to_index", None) or {},
        )
        spent_s += time.monotonic() - sampled_at
        served = self.traces if self.traces.in_step else None
        if not self.traces.idle or self._reported_throttled:
            results = self._with_blocks(self.traces, results)
        if step is not None or served is not None:
            self.counts.note_time(spent_s + (0.0 if served is None else served.last_step_s))
        return output if results is None else attach_results(output, results)

    def _with_blocks(
        self, traces: WorkerTraces | PeerTraces, results: StepResults | None
    ) -> StepResults | None:
        """End the step for traces, and return the step's results with those of the blocks added."""
        undone = list(traces.undone)
        ended, reports = traces.end(), traces.reports()
        waiting, throttled = traces.waiting, traces.throttled
        is_reported = waiting == self._reported_waiting and throttled == self._reported_throttled
        if ended or reports or undone or not is_reported:
            results = results or StepResults({}, {}, {})
            results.ended.extend(ended)
            results.reports.update(reports)
            results.undone.extend(undone)
            results.waiting = self._reported_waiting = waiting
            results.throttled = self._reported_throttled = throttled
        return results

    def _get_prompt_logprobs_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prompt logprobs without those of requests whose rows are computed again."""
        due = self.num_prompt_logprobs
        later = {request_id: due.pop(request_id) for request_id in self.traces.undone if request_id in due}
        try:
            return super()._get_prompt_logprobs_dict(*args, **kwargs)  # type: ignore[misc]
        finally:
            due.update(later)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        traces = self.traces
        if not traces.in_step:
            return super()._sample(*args, **kwargs)  # type: ignore[misc]
        batch, mask = self.input_batch, self.discard_request_mask.np  # type: ignore[attr-defined]
        undone = {batch.req_id_to_index[request_id] for request_id in traces.undone}
        mask[list(undone)] = True
        before = self._samples.states(batch) if traces.defers else {}
        output = super()._sample(*args, **kwargs)  # type: ignore[misc]
        self._samples.put_back(output, batch.req_id_to_index, traces.undone)
        sampled = output.sampled_token_ids
        output.sampled_token_ids = traces.on_samples(sampled)
        for request_id in traces.undone:
            index = batch.req_id_to_index[request_id]
            if index not in undone:
                mask[index] = True
                self._samples.keep(request_id, index, sampled, output, before)
        return output


def _uncompiled(*_: Any) -> None:
    """Forward pre-hook: run the model's modules one by one."""
    _call_modules(get_forward_context())


def _call_modules(context: Any) -> None:
    """Make a step call the model's modules one by one, neither compiled nor replayed from a CUDA graph."""
    context.skip_compiled = True
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE


def _has_logits(state: Any) -> bool:
    """Return whether the state that vLLM keeps between a step's phases holds logits."""
    return state is not None and state.logits is not None


def _arrived(scheduler_output: Any, key: str) -> list[tuple[str, Any]]:
    """Return the new requests whose ``extra_args`` have an entry under ``key``, with the entry."""
    return [
        (request.req_id, request.sampling_params.extra_args[key])
        for request in scheduler_output.scheduled_new_reqs
        if brings(request.sampling_params, key)
    ]
