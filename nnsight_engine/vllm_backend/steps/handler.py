"""The work of interventions in each phase of a step; a step without interventions runs vLLM's code unchanged.

A runner's adapter calls ``begin_step``, ``forward`` around the model, ``on_logits`` before sampling and
``leave`` after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.operator_choices import NO_TAPS, chosen_taps
from nnsight_engine.core.work_context import EAGER, GRAPH, PLAIN, TAP, EngineCounts
from nnsight_engine.plans.request_plan import PLAN_KEY
from nnsight_engine.plans.step.graph_table import GraphTable
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.plans.step.plan import StepPlan
from nnsight_engine.plans.step.stage_results import StageResults
from nnsight_engine.vllm_backend.compat import (
    GRAPHS,
    STRICT,
    EngineLimits,
    brings,
    describe_model,
    entry_of,
    is_single_tenant,
    params_of,
)
from nnsight_engine.vllm_backend.hooks import hooked, install_expert_points, keep_inputs_plain
from nnsight_engine.vllm_backend.model_points import Blocks, resolve_points
from nnsight_engine.vllm_backend.steps.faults import add_unembedding_bias, supply_inputs_per_layer
from nnsight_engine.vllm_backend.steps.graphs import StepGraphs, cut_at_taps
from nnsight_engine.vllm_backend.steps.outcome import StepOutcome, TraceReports, take_results, with_results
from nnsight_engine.vllm_backend.steps.tokens import StopTokens
from nnsight_engine.vllm_backend.steps.worker_state import Step, WorkerState
from nnsight_engine.vllm_backend.structure import ModelRuns, found_family
from nnsight_engine.vllm_backend.taps import (
    CONTEXT_KEY,
    TapStep,
    drop_unused_residuals,
    install_taps,
    untapped,
)
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY
from nnsight_engine.vllm_backend.traces.messages import StepFacts
from nnsight_engine.vllm_backend.traces.ranks import Ranks
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.stages import EarlyStageDispatcher, LastStageTraces, StageLink
from nnsight_engine.vllm_backend.traces.tensor_parallel import FollowingDispatcher, LeadingDispatcher
from nnsight_engine.vllm_backend.traces.trace_dispatcher import UntappedError
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from nnsight_engine.families.layout import EngineFamily
    from nnsight_engine.vllm_backend.compat import EngineLimits
    from nnsight_engine.vllm_backend.model_points import ModelPoints
    from nnsight_engine.vllm_backend.steps.dataset_sinks import DatasetSinks
    from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher

_LOG: Final = logging.getLogger(__name__)
_IMAGE: Final = "image"

ModelOutput = Any
"""Hidden states ``[rows, hidden]``, in a tuple with those of inner layers where a draft model reads them; on
an early pipeline stage ``IntermediateTensors``.
"""


@dataclasses.dataclass(slots=True)
class RunningStep:
    """A planned step between its forward pass and its end; ``hidden`` is None on an early pipeline stage."""

    step: Step
    plan: StepPlan
    hidden: torch.Tensor | None


class StepHandler:
    """The interventions of one worker; ``step`` is None if no live request intervenes."""

    def __init__(self, load: Callable[[], nn.Module], config: VllmConfig, device: torch.device) -> None:
        """Load the model, then install taps in it, before anything is compiled."""
        limits = EngineLimits.read(config)
        parallel = config.parallel_config
        has_taps = limits.taps != NO_TAPS
        self._config = config
        self.graphs = StepGraphs(is_cut=has_taps and cut_at_taps(config.compilation_config))
        self._model = model = load()
        install_expert_points(model, config.model_config.hf_text_config)
        add_unembedding_bias(model)
        supply_inputs_per_layer(model, config.scheduler_config.max_num_batched_tokens)
        points = resolve_points(
            model,
            config.model_config.hf_text_config,
            tensor_parallel_size=parallel.tensor_parallel_size,
            generates=config.model_config.runner_type != "pooling",
            is_causal=not config.model_config.is_mm_prefix_lm,
            find=None if limits.points == STRICT else partial(_family_by_structure, model, config, device),
            gather=_of_all_stages,
        )
        keep_inputs_plain(points)
        self.taps: frozenset[int] = frozenset()
        self._taps_of_stages: frozenset[int] = frozenset()
        if points.family.has_unused_residual:
            drop_unused_residuals([points.layers[layer] for layer in points.local_layers])
        if has_taps and points.has_stream:
            self._taps_of_stages = chosen_taps(limits.taps, len(points.layers))
            self.taps = frozenset(filter(points.stage.has, self._taps_of_stages))
            install_taps(points.layers, points.family, self.taps)
            if limits.intervention_graphs == GRAPHS:
                self.graphs.make_table = self._graph_table
        self.counts = EngineCounts()
        self.traces = traces_of_worker(points, config, limits)
        self.reports = TraceReports(self.traces)
        self.datasets: DatasetSinks | None = None
        self.interventions = WorkerState(
            points,
            describe_model(points, config, limits),
            device,
            max_request_bytes=limits.max_capture_bytes_per_request,
            max_engine_bytes=limits.max_capture_bytes_engine,
            fails_anywhere=_fails_anywhere,
            is_asynchronous=bool(config.scheduler_config.async_scheduling),
        )
        self.stops = StopTokens(device, is_asynchronous=bool(config.scheduler_config.async_scheduling))
        self._running: RunningStep | None = None
        self._spans: list[TraceSpan] = []
        self._undone_at: dict[str, int] = {}
        self.step: Step | None = None
        self._spent_s = 0.0
        self._from_stages: list[StageResults] = []

    @property
    def model_spec(self) -> ModelSpec:
        return self.interventions.spec

    @property
    def trace_spec(self) -> ModelSpec:
        """The model's description for traces: with the layout, and the leaves that are sharded over ranks."""
        leaves = self.interventions.points.leaf_specs(wholes=True)
        layout = self.interventions.points.layout.to_plain()
        return dataclasses.replace(self.model_spec, leaves=leaves, layout=layout)

    @property
    def runs_blocks(self) -> bool:
        """Whether the blocks of traces run on this worker; of several ranks or stages, they run on one."""
        return self.traces.dispatcher.runs_blocks

    def learn_route(self, dummy_run: Callable[[], Any]) -> None:
        """Enable serving blocks at the taps, if a step can be run twice and there is only one worker."""
        config = self._config
        if (
            config.parallel_config.world_size > 1
            or config.model_config.has_inner_state  # a second run would advance the state again
            or not self.taps
        ):
            return
        handle = self._model.register_forward_pre_hook(_uncompiled)
        try:
            self.traces.learn_route(dummy_run, self.taps)
        finally:
            handle.remove()

    # Phases of a step.

    def serve_stages(self, scheduled: SchedulerOutput, due_prompt_logprobs: Collection[str]) -> None:
        """Serve values of earlier stages to blocks, if this is the last of several pipeline stages."""
        if self.traces.serves_stages:
            self.traces.before(self._facts(scheduled, _arrived(scheduled, TRACE_KEY), due_prompt_logprobs))

    def receive(self, received: IntermediateTensors | None) -> None:
        """Take the results of operations on earlier stages out of the tensors that a stage receives."""
        self._from_stages = take_results(received)

    def begin_step(self, scheduled: SchedulerOutput, due_prompt_logprobs: Collection[str]) -> None:
        """Tell operations, traces, datasets and graphs which requests arrive with a step, or have ended."""
        finished = scheduled.finished_req_ids
        planned, traced = _arrived(scheduled, PLAN_KEY), _arrived(scheduled, TRACE_KEY)
        returned = {} if self.interventions.idle else _returned(scheduled)
        self.interventions.begin_step(planned, finished, returned)
        if self.datasets is not None:
            self.datasets.begin_step(scheduled)
        self._running = self.step = None
        self._spans = []
        self.stops.begin_step(scheduled)
        if traced or self.reports.is_due or not self.traces.known.present.isdisjoint(finished):
            self.traces.begin_step(self._facts(scheduled, traced, due_prompt_logprobs))
        taps, has_drafts = self._taps_of_stages, self._config.speculative_config is not None
        arrived = {
            name: self.interventions.instructions_per_row(name, taps, has_drafts=has_drafts)
            for name, _ in planned
        }
        self.graphs.begin_step(
            arrived | dict.fromkeys(name for name, _ in traced), finished, scheduled.num_scheduled_tokens
        )

    def _graph_table(self, num_rows: int) -> GraphTable:
        return self.interventions.graph_table(self.taps, len(self._taps_of_stages), num_rows)

    def _facts(
        self,
        scheduled: SchedulerOutput,
        traced: Sequence[tuple[str, Any]],
        due_prompt_logprobs: Collection[str],
    ) -> StepFacts:
        """Return what the traces have to know of a step; ``traced`` are its new requests with a trace."""
        # A step cannot be undone for requests whose values operations have already read, and for those whose
        # prompt logprobs vLLM returns only once, unless it is undone before they are computed.
        new = [
            request.req_id
            for request in scheduled.scheduled_new_reqs
            if request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None
        ]
        return StepFacts(
            traced,
            scheduled.finished_req_ids,
            scheduled.num_scheduled_tokens,
            is_single_tenant(scheduled),
            set(self.interventions.live),
            {*due_prompt_logprobs, *new},
        )

    def encode(
        self,
        inputs: Mapping[str, Sequence[int]],
        features_of: Callable[[str], Sequence[Any]],
        run: Callable[[dict[str, list[int]]], Any],
    ) -> None:
        """Run the vision encoder before a step, for each image with operations inside apart.

        ``inputs`` are indices of a request's media; ``features_of`` gives its media; ``run`` encodes some.
        """
        plain_inputs: dict[str, list[int]] = {}
        for request_id, indices in inputs.items():
            features = features_of(request_id)
            for index in indices:
                if features[index].modality != _IMAGE or not self.interventions.enters_encoder(request_id):
                    plain_inputs.setdefault(request_id, []).append(index)
                    continue
                image = sum(feature.modality == _IMAGE for feature in features[:index])
                with self.interventions.encoding(request_id, image):
                    run({request_id: [index]})
        if plain_inputs:
            run(plain_inputs)

    def enters_encoder(self, request_ids: Iterable[str]) -> bool:
        return any(map(self.interventions.enters_encoder, request_ids))

    @property
    def is_idle(self) -> bool:
        return self.interventions.idle and self.traces.idle

    def plain_forward(self, run: Callable[[], ModelOutput]) -> ModelOutput:
        self.counts.steps[PLAIN] += 1
        return run()

    def forward(self, step: Step, run: Callable[[], ModelOutput]) -> ModelOutput:
        """Run the model in its forward context; an early stage's output gets its operations' results."""
        self.step = step
        plan = None if self.interventions.idle else self._timed_plan(step)
        traced = not self.traces.idle and self._begin_traced_step(step)
        if plan is None and not traced:
            return self.plain_forward(run)
        context = get_forward_context()
        points = self.interventions.points
        dispatcher = self.traces.dispatcher if traced else None
        tap_step = TapStep(plan, dispatcher, returns_none=points.family.returns_none)
        context.additional_kwargs[CONTEXT_KEY] = tap_step
        with contextlib.ExitStack() as stack:
            missing = set() if plan is None else plan.taps() - self.taps
            if plan is not None and (missing or plan.hook_sites()):
                _call_modules(context)
                stack.enter_context(hooked(points, plan, tap_step.is_models_own))
                stack.enter_context(untapped(points.layers, points.family, missing, tap_step))
            output = self._traced_forward(step, run, context) if traced else run()
        is_uncompiled = context.skip_compiled or any(results.is_uncompiled for results in self._from_stages)
        return self._after_forward(step, plan, output, EAGER if is_uncompiled else TAP)

    def replay(self, step: Step | None, table: GraphTable, run: Callable[[], ModelOutput]) -> ModelOutput:
        """Replay a full graph whose table fits the step; ``step`` is None if no request is registered."""
        self.step = step
        plan = None if step is None else self._timed_plan(step)
        if step is None or plan is None:
            table.fill(None)
            return self.plain_forward(run)
        table.serve(plan)
        return self._after_forward(step, plan, run(), GRAPH)

    def _after_forward(
        self, step: Step, plan: StepPlan | None, output: ModelOutput, tier: str
    ) -> ModelOutput:
        """Run the operations after the blocks, or on an early stage add the results to its output."""
        self._note_tier(plan, tier)
        if plan is None:
            return output
        received = self._from_stages
        if isinstance(output, IntermediateTensors):
            return self._sent_on(step, plan, output)
        self.interventions.add_results(plan, received)
        hidden = output[0] if isinstance(output, tuple) else output
        self.interventions.on_hidden(plan, hidden)
        self._running = RunningStep(step, plan, hidden)
        return output

    def _sent_on(self, step: Step, plan: StepPlan, output: IntermediateTensors) -> IntermediateTensors:
        """Return an early stage's output, with its operations' results and those of the stages before."""
        results = self.interventions.results_of_stage(plan)
        self.interventions.collect(plan)
        self._running = RunningStep(step, plan, None)
        return with_results(output, [*self._from_stages, results])

    def _timed_plan(self, step: Step) -> StepPlan | None:
        """Plan a step, and keep the seconds that it took; None if no operation takes part."""
        begin = time.monotonic()
        plan = self.interventions.plan(step)
        self._spent_s = time.monotonic() - begin
        return plan

    def _begin_traced_step(self, step: Step) -> bool:
        """Tell the traces which rows of the step are theirs; return whether a block takes part."""
        self.stops.find_ended(step.request_ids)
        self._spans = [
            TraceSpan(
                rows.request_id,
                rows.index,
                rows.row,
                rows.num_rows,
                # A step planned before the last one was undone computes the last one's rows.
                min(rows.start, self._undone_at.get(rows.request_id, rows.start)),
                complete=step.is_sampled(rows),
            )
            for rows in step.rows()
            if self.traces.takes_part(rows.request_id) and rows.request_id not in self.stops.ended
        ]
        return self.traces.step(self._spans, step.num_padded_rows)

    def _note_tier(self, plan: StepPlan | None, tier: str) -> None:
        """Count a step by how it runs, for the metrics and for the results of its requests."""
        self.counts.steps[tier] += 1
        self.traces.dispatcher.is_uncompiled = tier == EAGER
        if plan is not None:
            plan.note_tier(tier)

    def _traced_forward(self, step: Step, run: Callable[[], ModelOutput], context: Any) -> ModelOutput:
        """Run the model with blocks; again uncompiled if the blocks request more than the taps provide."""
        traces = self.traces
        if traces.by_taps and step.is_repeatable:
            try:
                with traces.tapped():
                    return run()
            except UntappedError:
                traces.again()
        _call_modules(context)
        with traces.running():
            return run()

    def on_logits(self, logits: torch.Tensor | None, unembed: Callable[[torch.Tensor], Any]) -> Any:
        """Run the operations at the logits, and return the logits from which tokens are to be sampled.

        ``logits`` is ``[requests + drafts, vocabulary]``, None on a rank without, whose results are not used.
        """
        running = self._running
        if running is not None and running.hidden is not None:
            if logits is not None:
                rows = running.step.logits_rows()
                self.interventions.on_logits(running.plan, running.hidden, logits, rows, unembed)
            self.interventions.collect(running.plan)
        if logits is None or not self.traces.in_step:
            return logits
        step = self.step
        if step is None or step.num_drafts is None:
            return self.traces.on_logits(logits)
        # Traced requests have no drafts, and one row of logits each.
        ends = to_device(step.logits_ends(), logits.device)
        return logits.index_copy_(0, ends, self.traces.on_logits(logits[ends]).to(logits.dtype))

    def on_samples(self, sampled: torch.Tensor) -> torch.Tensor:
        """Offer the sampled ids to traces, ``[requests, 1 + drafts]``; return them as blocks left them."""
        if sampled.shape[1] == 1:
            return self.traces.on_samples(sampled)
        first_samples = sampled[:, :1]  # traced requests have no drafts
        first_samples.copy_(self.traces.on_samples(first_samples))
        return sampled

    def note_samples(self, sampled: torch.Tensor) -> None:
        """Note the tokens of traced requests, to find those that end; not of steps that are undone."""
        undone = set(self.traces.undone)
        kept = [span for span in self._spans if span.complete and span.request_id not in undone]
        self.stops.note({span.request_id: span.index for span in kept}, sampled)

    def leave_pooled(self) -> StepOutcome | None:
        """End the step of a model that pools; without logits, its reads are yet to be collected."""
        if self._running is not None and self._running.hidden is not None:
            self.interventions.collect(self._running.plan)
        return self.leave()

    def leave(self) -> StepOutcome | None:
        """End the step after sampling has started, without waiting; None if there is nothing to send."""
        running, self._running = self._running, None
        plan = None if running is None else running.plan
        begin = time.monotonic()
        # Read before ``leave``, which distributes the plan's time over its requests and resets it.
        spent_s = 0.0 if plan is None else self._spent_s + plan.spent_s
        delivery = self.interventions.leave(plan)
        is_traced, waited_s = self.traces.in_step, self.traces.waited_s
        undone = set(self.traces.undone)
        self._undone_at = {span.request_id: span.start for span in self._spans if span.request_id in undone}
        reported = self.reports.end_step()
        if plan is None and not is_traced:
            has_sent = delivery is not None or reported is not None
            return StepOutcome(delivery, reported, None, self.counts, self.datasets) if has_sent else None
        spent_s += time.monotonic() - begin + (self.traces.waited_s - waited_s if is_traced else 0.0)
        return StepOutcome(delivery, reported, spent_s, self.counts, self.datasets)


def _uncompiled(*_: Any) -> None:
    _call_modules(get_forward_context())


def _family_by_structure(model: nn.Module, config: VllmConfig, device: torch.device) -> EngineFamily:
    """Find the family of a model without a table by running it, and log what was found."""
    result = found_family(ModelRuns(model, config, device))
    _LOG.warning(
        "%s has no table of points: they are found by the model's structure; %s",
        type(model).__name__,
        "; ".join(result.remarks),
    )
    return result.family


def _of_all_stages(blocks: Blocks) -> list[Blocks]:
    """Return the blocks of each pipeline stage; all stages must call this together."""
    group = get_pp_group()
    of_stages: list[Any] = [blocks] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(of_stages, blocks, group=group.cpu_group)
    return of_stages


def _call_modules(context: Any) -> None:
    context.skip_compiled = True
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE


def _returned(scheduled: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens each request has that comes back after a preemption."""
    return {
        request.req_id: len(request.prefill_token_ids)
        for request in scheduled.scheduled_new_reqs
        if request.prefill_token_ids is not None
    }


def _arrived(scheduled: SchedulerOutput, key: str) -> list[tuple[str, Any]]:
    """Return a step's new requests that have an entry of this key, each with the entry."""
    return [
        (request.req_id, entry_of(params_of(request), key))
        for request in scheduled.scheduled_new_reqs
        if brings(params_of(request), key)
    ]


def _fails_anywhere(failure: Exception | None) -> bool:
    """Return whether any tensor-parallel rank has a failure; all call it in the same order."""
    group = get_tp_group()
    has_failed = torch.tensor(int(failure is not None))
    if group.world_size > 1:
        torch.distributed.all_reduce(has_failed, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return bool(has_failed)


def traces_of_worker(points: ModelPoints, config: VllmConfig, limits: EngineLimits) -> WorkerTraces:
    """Return the traces of this worker; all workers of a group must call this together."""
    last, stage = get_pp_group().world_size - 1, get_pp_group().rank_in_group
    dispatcher: TraceDispatcher | None = None
    if points.tensor_parallel_size > 1:  # and one stage: both together are refused at start
        ranks = Ranks(get_tp_group())
        dispatcher = (FollowingDispatcher if ranks.rank else LeadingDispatcher)(ranks, points)
    elif stage < last:
        dispatcher = EarlyStageDispatcher(StageLink(last), points)
    elif last:
        return LastStageTraces(points, config, list(map(StageLink, range(last))), limits)
    return WorkerTraces(points, config, limits, dispatcher=dispatcher)
