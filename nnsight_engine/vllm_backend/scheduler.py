"""The scheduler class that vLLM loads by name: sends each step's results with the outputs they belong to.

A request that failed is finished with an error, and its blocks are evicted from the prefix cache, since no
other request may use keys and values that lack a write. The state of a request is released however it ends.
With speculative decoding it decides which requests take drafts, and how many tokens a step yields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Self

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from nnsight_engine.plans.collect.outbox import Outbox
from nnsight_engine.plans.records import Failure, StepResults
from nnsight_engine.plans.request_plan import PLAN_KEY, OperationKind, RequestPlan
from nnsight_engine.plans.where import takes_drafts
from nnsight_engine.vllm_backend.background import BACKGROUND_KEY, Background, PackEntry
from nnsight_engine.vllm_backend.compat import (
    brings,
    detach_results,
    entry_of,
    mark_step,
    params_of,
    record_allocated_blocks,
)
from nnsight_engine.vllm_backend.content_logs import redact_content
from nnsight_engine.vllm_backend.fair_scheduler import FairScheduler, missing
from nnsight_engine.vllm_backend.processes import end_with_parent
from nnsight_engine.vllm_backend.request_parts import TensorTable
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY, TraceEntry
from nnsight_engine.vllm_backend.traces.reporting import Report
from nnsight_engine.vllm_backend.written_blocks import SharedBlocks, UncleanBlocks


class DraftScheduler(FairScheduler):
    """The fair scheduler, with ``undrafted`` requests; ``num_tokens`` are those of a step before a stop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.undrafted: set[str] = set()  # requests that take no drafts
        self.num_tokens: dict[str, int] = {}  # that each request has kept of the last step
        drafts = self.vllm_config.speculative_config
        self._num_draft_slots: int = 0 if drafts is None else drafts.max_num_new_slots_for_drafting
        self._num_batched_tokens: int = self.scheduler_config.max_num_batched_tokens

    @property
    def longest_whole_prompt(self) -> int:
        return min(self.whole_step_tokens, self._num_batched_tokens - self._num_draft_slots)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Take the drafts of ``undrafted`` requests out of the step, before vLLM counts it as computed."""
        if self.num_spec_tokens:
            self.undrafted &= self.requests.keys()
            drafts = scheduler_output.scheduled_spec_decode_tokens
            for request_id in self.undrafted & drafts.keys():
                num_drafts = len(drafts.pop(request_id))
                scheduler_output.num_scheduled_tokens[request_id] -= num_drafts
                scheduler_output.total_num_scheduled_tokens -= num_drafts
        super()._update_after_schedule(scheduler_output)
        self._drop_drafts()

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        for request_id in self.undrafted if self.num_spec_tokens else ():
            if request_id in self.requests:
                self.requests[request_id].spec_token_ids = []

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], **others: Any
    ) -> tuple[list[int], bool]:
        """Note how many of the step's tokens the request keeps; vLLM cuts them off behind a stop."""
        kept, is_stopped = super()._update_request_with_output(request, new_token_ids, **others)
        if self.num_spec_tokens:
            self.num_tokens[request.request_id] = len(kept)
        return kept, is_stopped


_SPARE_BLOCKS: Final = 2
"""Blocks beyond a request's full ones: for the rest of its tokens, and for its next ones."""

_POOLED_NOTHING: Final = torch.empty(0)
"""The output of a request that has failed before it was pooled."""


@dataclasses.dataclass(slots=True)
class RequestGroup:
    """The requests of one trace, which start together; ``missing`` has None for an unknown number."""

    missing: dict[int, int | None]
    members: list[str]

    def join(self, request_id: str, entry: TraceEntry) -> None:
        """Count a choice of a block as arrived; ``missing`` is the number to come, None before the first."""
        self.members.append(request_id)
        if entry.index in self.missing:
            num_missing = (self.missing[entry.index] or entry.num_choices) - 1
            if num_missing > 0:
                self.missing[entry.index] = num_missing
            else:
                del self.missing[entry.index]


class InterventionScheduler(DraftScheduler):
    def __new__(cls, vllm_config: VllmConfig, *_args: Any, **_kwargs: Any) -> Self:
        """Make it an ``AsyncScheduler`` too if steps are asynchronous: vLLM loads this one class by name."""
        is_asynchronous = bool(vllm_config.scheduler_config.async_scheduling)
        bases = (cls, AsyncScheduler) if is_asynchronous and not issubclass(cls, AsyncScheduler) else (cls,)
        kind = type(f"Async{cls.__name__}", bases, {}) if len(bases) > 1 else cls
        new: Self = super().__new__(kind)
        return new

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The scheduler always runs in the engine's own process, so that process is set up here.
        end_with_parent()
        redact_content()
        self._outbox = Outbox()
        self._owners: dict[str, str] = {}  # keys of entries, by which the server knows requests
        self._shared = SharedBlocks(self.kv_cache_manager)
        self._traced: set[str] = set()
        self._stepwise: set[str] = set()  # traced ones that take a step at a time, see ``_may_follow``
        self._whole_prompts: set[str] = set()  # those that are not split over steps
        self._groups: dict[str, RequestGroup] = {}
        self._reports: dict[str, list[Report]] = {}
        self._waiting: frozenset[str] = frozenset()  # requests that wait for their blocks
        self._throttled: frozenset[str] = frozenset()  # tenants whose sandboxes take too long
        self._background = Background(self._has_room_for)
        self.contents = TensorTable()
        self._unclean = UncleanBlocks()
        record_allocated_blocks(self.kv_cache_manager)

    def add_request(self, request: Request) -> None:
        """Queue the request; tensors that several requests share are kept once."""
        params = params_of(request)
        entry = entry_of(params, PLAN_KEY)
        if request.prompt_embeds is not None:
            self._unclean.watch(request.request_id)
        if brings(params, TRACE_KEY):
            self._unclean.watch(request.request_id)
            self._traced.add(request.request_id)
            self._whole_prompts.add(request.request_id)
            self.undrafted.add(request.request_id)
            self._gather(request)
        if entry is not None:
            entry["tensors"] = self.contents.acquire(request.request_id, entry["tensors"])
            plan = entry["plan"]
            if isinstance(plan, bytes):  # in one process, the choices of a request share the entry
                plan = entry["plan"] = RequestPlan.decode(plan)  # the workers receive it decoded
            stops_outside = request.sampling_params is not None and bool(params.stop)
            self._outbox.open(request.request_id, plan, stops_outside=stops_outside)
            self._owners[request.request_id] = entry["key"]
            self.work.add(request.request_id, plan, request.all_token_ids)
            # A stop string is found by the API process, too late for rows that were accepted behind it.
            if stops_outside or not takes_drafts(plan):
                self.undrafted.add(request.request_id)
            if plan.needs_whole_prompt:
                self._whole_prompts.add(request.request_id)
            if plan.images:
                request.mm_features = _own_images(request)
            if plan.fingerprint:
                self._unclean.watch(request.request_id)
                self._shared.add(request.request_id)
        if request.request_id in self._traced and self._ends_outside(request):
            self._stepwise.add(request.request_id)
        super().add_request(request)
        self._join_pack(request)

    def _join_pack(self, request: Request) -> None:
        """Register a request of a pack; once all have arrived, they are queued in the order of the pack."""
        entry = PackEntry.of(entry_of(params_of(request), BACKGROUND_KEY))
        if entry is None:
            return
        self.undrafted.add(request.request_id)
        members = self._background.add(request.request_id, entry)
        pack = [self.requests[member] for member in members if member in self.requests]
        self.waiting.remove_requests(pack)
        for member in pack:
            self.waiting.add_request(member)

    def _gather(self, request: Request) -> None:
        """Register a request of a trace with several.

        They must start together, because their blocks may wait for each other.
        """
        try:
            entry = TraceEntry.from_plain(request.sampling_params.extra_args[TRACE_KEY])
        except msgspec.ValidationError:
            return  # the worker ends such a request
        if len(entry.groups) == 1:
            return
        new = RequestGroup(dict.fromkeys(range(len(entry.groups))), [])
        self._groups.setdefault(entry.key, new).join(request.request_id, entry)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule without requests that wait for blocks or packs, are throttled, or may be about to end."""
        held = self._waiting.union(self._all_throttled()) if self._throttled else self._waiting
        self.is_step_of_pack = False
        if self._traced and self._in_flight and self.scheduler_config.async_scheduling:
            held = held.union(self._traced_in_flight())
        if self._background:
            held = held.union(self._held_for_packs())
        with self._without(held) if held else contextlib.nullcontext():
            output = super().schedule(*args, **kwargs)
        if self.is_step_of_pack and not output.num_scheduled_tokens:
            self._background.note_nothing_scheduled()
        mark_step(output, is_single_tenant=len(self.sharing) == 1, is_alone=not self.is_busy_elsewhere)
        self._unclean.note(output)
        return output

    def _held_for_packs(self) -> set[str]:
        """Return the requests kept out of the step, since packs of background requests run alone.

        Preempts packs if others lack blocks.
        """
        self._background.keep(self.requests)
        held = self._background.held(self.requests, may_start=not self.pause_state)
        self.is_step_of_pack = bool(self.requests.keys() & self._background.members - held)
        is_anyone_waiting = any(request.request_id not in self._background for request in self.waiting)
        if not self.is_step_of_pack and is_anyone_waiting and not self._has_free_blocks():
            for request in [one for one in self.running if one.request_id in self._background]:
                if not request.num_in_flight_tokens:
                    self.running.remove(request)
                    self._preempt_request(request, time.monotonic())
        return held

    def _note_pack_step(self, scheduler_output: SchedulerOutput) -> None:
        if self._background and self._in_flight:
            seconds = time.perf_counter() - self._in_flight[0].moment
            self._background.note_step(scheduler_output.num_scheduled_tokens, seconds)

    def _has_room_for(self, requests: list[Request]) -> bool:
        num_tokens = [request.num_tokens + self.num_lookahead_tokens for request in requests]
        num_blocks = sum(number // self.block_size + _SPARE_BLOCKS for number in num_tokens)
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        num_free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return bool(
            num_groups * num_blocks <= num_free
            and len(requests) + len(self.running) <= self.max_num_running_reqs
        )

    def _preempt_request(self, request: Request, timestamp: float, **others: Any) -> None:
        """Preempt a request. If it intervenes, the results of its step under way are not dropped."""
        if request.request_id in self._outbox or request.request_id in self._traced:
            others["drop_stale_output"] = False
        super()._preempt_request(request, timestamp, **others)

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        """Return the new blocks to zero before the step: all if the model needs it, else the unclean ones."""
        allocated = self.kv_cache_manager.take_new_block_ids()
        blocks = allocated if self.needs_kv_cache_zeroing else self._unclean.among(allocated)
        return blocks or None

    def _ends_outside(self, request: Request) -> bool:
        """Return whether more than its tokens may end a request, see ``StopTokens``.

        Stop strings are found by the API process, repetitions by vLLM's scheduler, and the operation ``stop``
        where its results are made. With stages, another worker samples.
        """
        params = request.sampling_params
        entry = entry_of(params, PLAN_KEY)
        return bool(
            params.stop
            or params.repetition_detection is not None
            or self.parallel_config.pipeline_parallel_size > 1
            or (entry is not None and any(op.kind is OperationKind.STOP for op in entry["plan"].ops))
        )

    def _traced_in_flight(self) -> set[str]:
        """Return the traced requests of steps under way that decide about their next step.

        The other requests of their traces are among them, so that they stay in the same steps.
        """
        self._traced &= self.requests.keys()
        self._stepwise &= self._traced
        request_ids: set[str] = set()
        for request in (self.requests[request_id] for request_id in self._traced):
            if request.num_in_flight_tokens and not self._may_follow(request):
                request_ids.add(request.request_id)
                request_ids.update(self.group_members(request))
        return request_ids

    def _may_follow(self, request: Request) -> bool:
        """Return whether a traced request's next step may be planned before the one under way has ended.

        A step without a sandboxed block is undone. If it has one generated position, then the next step
        computes it again, unless the request is preempted in between.
        """
        if request.request_id in self._stepwise:
            return False
        if _sandbox_of(request) is None:
            return True
        is_generating = request.num_computed_tokens > request.num_prompt_tokens
        return is_generating and request.num_in_flight_tokens == 1 and self._has_free_blocks()

    def _has_free_blocks(self) -> bool:
        """Return whether the next step certainly finds blocks, so that it preempts nobody."""
        num_blocks = 2 * len(self.running) + self.max_num_scheduled_tokens // self.block_size
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        return bool(self.kv_cache_manager.block_pool.get_num_free_blocks() >= num_groups * num_blocks)

    def may_be_preempted(self, request: Request) -> bool:
        """Return whether the request may be preempted: no sandboxed one whose step may yet be undone."""
        return _sandbox_of(request) is None or not request.num_in_flight_tokens

    def _all_throttled(self) -> list[str]:
        """Return the requests of tenants whose sandboxes take too long."""
        return [
            request.request_id
            for request in self.requests.values()
            if _sandbox_of(request) in self._throttled
        ]

    @contextlib.contextmanager
    def _without(self, request_ids: Collection[str]) -> Iterator[None]:
        held = [request for request in self.running if request.request_id in request_ids]
        with self.without_running(held), self.held_back(lambda request: request.request_id in request_ids):
            yield

    def schedule_all(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule without requests of incomplete groups, and without whole prompts that have no room yet."""
        if not self.waiting:  # no request to hold back
            return super().schedule_all(*args, **kwargs)
        before = list(self.waiting) if self._whole_prompts or self._groups else []
        of_incomplete_groups = self._hold_groups() if self._groups else []
        without_room = self._hold_back() if self._whole_prompts else []
        output: SchedulerOutput = super().schedule_all(*args, **kwargs)
        if without_room or of_incomplete_groups:
            self.put_back(before, {*without_room, *of_incomplete_groups})
        return output

    def needs_single_step(self, request: Request) -> bool:
        """Return whether the prompt stays whole, as traced or averaged ones do that fit into one step."""
        return self._stays_whole(request) or super().needs_single_step(request)

    def _stays_whole(self, request: Request) -> bool:
        return request.request_id in self._whole_prompts and request.num_tokens <= self.longest_whole_prompt

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> Any:
        """Return the images to encode; a prompt that stays whole waits rather than being split at one."""
        scheduled = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens
        )
        is_split = scheduled[1] < num_new_tokens and self._stays_whole(request)
        return ([], 0, encoder_compute_budget, [], []) if is_split else scheduled

    def group_members(self, request: Request) -> Collection[str]:
        groups = (group for group in self._groups.values() if request.request_id in group.members)
        return next((group.members for group in groups), ())

    def _hold_groups(self) -> list[Request]:
        """Remove and return the waiting requests of traces whose other requests have not all arrived."""
        for key in [
            key for key, group in self._groups.items() if self.requests.keys().isdisjoint(group.members)
        ]:
            del self._groups[key]
        members = {member for group in self._groups.values() if group.missing for member in group.members}
        held = [request for request in self.waiting if request.request_id in members]
        self.waiting.remove_requests(held)
        return held

    def _hold_back(self) -> list[Request]:
        """Remove and return the first whole prompt without room, and all behind it.

        The requests behind it must wait as well: otherwise they could overtake it in every step.
        """
        self._whole_prompts &= self.requests.keys()
        limit = self.longest_whole_prompt
        free = self.max_num_scheduled_tokens - sum(missing(request) for request in self.running)
        # A draft model needs rows of its own, for each request of the step.
        spare = self._num_batched_tokens - self.max_num_scheduled_tokens
        spare -= self._num_draft_slots * (len(self.running) + 1)
        waiting = list(self.waiting)
        for index, request in enumerate(waiting):
            needed = missing(request)
            if request.request_id in self._whole_prompts and min(free, free + spare) < needed <= limit:
                held = waiting[index:]
                self.waiting.remove_requests(held)
                return held
            free -= min(needed, free)
            spare -= self._num_draft_slots
        return []

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """End requests (None: all) as vLLM does, and drop their state; blocks of writers are remembered."""
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        elif request_ids is not None:
            request_ids = list(request_ids)
        self._shared.keep(request_ids, len(self._in_flight))
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._drop(request.request_id)
            for group in self._groups.values():
                if request.request_id in group.members:
                    group.missing.clear()  # the rest may never arrive: stop waiting for it
        return finished

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step's output as vLLM does; send its results, and end requests that failed or stopped."""
        results = detach_results(model_runner_output)
        self._note_pack_step(scheduler_output)
        # Before the outputs: later, failed requests may no longer hold their blocks.
        spoiled = set() if results is None else self._shared.evict(results.failures)
        self.num_tokens.clear()
        stopped = self._drop_samples(results, model_runner_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        self._outbox.absorb(results, self.num_tokens)
        if spoiled:  # an asynchronous scheduler publishes blocks as it processes the outputs
            self.kv_cache_manager.evict_blocks(spoiled)
        if results is not None:
            self._note_blocks(results, scheduler_output.num_scheduled_tokens)
            for request_id, report in results.reports.items():
                self._reports.setdefault(request_id, []).append(report)
        if self._reports:
            self._attach_reports(outputs)
        if self._outbox:
            # Skip the pass over the outputs while none of them can carry results.
            if self._outbox.sends_each_time or self.finished_req_ids:
                self._attach(outputs)
            if results is not None:
                self._end_failed(results.failures, outputs)
        for request_id in stopped:
            self._end_with_results(request_id, RequestStatus.FINISHED_STOPPED, outputs)
        for request_id in () if results is None else results.ended:
            self._end_request(request_id, RequestStatus.FINISHED_STOPPED, None, outputs)
        self._shared.end_step()
        return outputs

    def _drop_samples(self, results: StepResults | None, output: ModelRunnerOutput) -> list[str]:
        """Return the requests that an operation has stopped, whose samples are no part of their answers."""
        if results is None or not results.stopped:
            return []
        stopped = [request_id for request_id in dict.fromkeys(results.stopped) if request_id in self._outbox]
        for request_id in stopped:
            output.sampled_token_ids[output.req_id_to_index[request_id]] = []
            # vLLM has an output for these only together with a token.
            output.prompt_logprobs_dict.pop(request_id, None)
        return stopped

    def _note_blocks(self, results: StepResults, num_tokens: Mapping[str, int]) -> None:
        """Record which requests wait for their blocks, and undo steps that ran without their blocks."""
        for request_id in results.undone:
            self._undo(request_id, num_tokens[request_id])
        if results.waiting is not None:
            self._waiting = results.waiting
        if results.throttled is not None:
            self._throttled = results.throttled

    def _undo(self, request_id: str, num_tokens: int) -> None:
        """Take back a step that ran without the request's block, so that its tokens are computed again."""
        request = self.requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return
        if request.num_computed_tokens > num_tokens:
            request.num_computed_tokens -= num_tokens
            # Of the token that was not sampled; the step that follows may have another.
            request.num_output_placeholders = max(request.num_output_placeholders - 1, 0)
            return
        # The step was the whole prompt: queue the request as if it had just arrived, so that its prompt is
        # not split over several steps.
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())

    def num_pending(self) -> int:
        return len(self._outbox)

    def _attach(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add to each output what its request's operations have read; drop the state of ended requests."""
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                if output.request_id not in self._outbox:
                    continue
                payload = self._outbox.take_payload(output.request_id, final=output.finished)
                if payload is not None:
                    _send(output, self._message_of(output.request_id, payload.encode()))
                if output.finished:
                    self._drop(output.request_id)

    def _attach_reports(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add to each output what its request's block reports, and drop reports of ended requests."""
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                reports = self._reports.pop(output.request_id, None)
                if reports is not None:
                    _send(output, {TRACE_KEY: reports})
        for request_id in self._reports.keys() - self.requests.keys():
            del self._reports[request_id]

    def _end_failed(self, failures: dict[str, Failure], outputs: dict[int, EngineCoreOutputs]) -> None:
        for request_id in failures:
            self._end_with_results(request_id, RequestStatus.FINISHED_ERROR, outputs)

    def _end_with_results(
        self, request_id: str, status: RequestStatus, outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """End a request that operations failed or stopped; its last output has the rest of its results."""
        if request_id not in self._outbox:
            return  # it has ended otherwise
        payload = self._outbox.take_payload(request_id, final=True)
        message = None if payload is None else self._message_of(request_id, payload.encode())
        self._end_request(request_id, status, message, outputs)

    def _end_request(
        self,
        request_id: str,
        status: RequestStatus,
        message: dict[str, Any] | None,
        outputs: dict[int, EngineCoreOutputs],
    ) -> None:
        """End a request, and add its last output, with ``message``, to those of its client."""
        for request in self.finish_requests(request_id, status):
            output = EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[],
                pooling_output=_POOLED_NOTHING if request.sampling_params is None else None,
                finish_reason=request.get_finished_reason(),
                kv_transfer_params=message,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

    def _message_of(self, request_id: str, data: bytes) -> dict[str, Any]:
        return {PLAN_KEY: {"key": self._owners[request_id], "data": data}}

    def _drop(self, request_id: str) -> None:
        """Drop the state of an ended request; one without operations has none."""
        if self._outbox.close(request_id):
            del self._owners[request_id]
            self._shared.discard(request_id)
            self.work.discard(request_id)
            self.contents.release(request_id)


def _own_images(request: Request) -> list[Any]:
    """Return media with names of their own in the encoder's cache, as operations change what it keeps.

    Media without content keep their name, by which the engine finds it.
    """
    return [
        feature
        if feature.data is None
        else dataclasses.replace(feature, identifier=f"{feature.identifier}-{request.request_id}-{index}")
        for index, feature in enumerate(request.mm_features)
    ]


def _sandbox_of(request: Request) -> str | None:
    """Return the tenant in whose sandbox the request's code runs; None if in none."""
    entry = entry_of(request.sampling_params, TRACE_KEY)
    sandbox_of = entry.get("sandbox_of") if isinstance(entry, dict) else None
    return sandbox_of if isinstance(sandbox_of, str) else None


def _send(output: EngineCoreOutput, message: dict[str, Any]) -> None:
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), **message}
