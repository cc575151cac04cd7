"""Adapter of vLLM's V1 model runner.

``_model_forward`` is called on the final batch. Between ``execute_model`` and ``sample_tokens``,
``execute_model_state`` holds the logits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.config import CUDAGraphMode
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput

from nnsight_engine.vllm_backend.compat import attach_results, is_alone, zero_blocks
from nnsight_engine.vllm_backend.steps.adapters import AdaptersMixin
from nnsight_engine.vllm_backend.steps.cpu_sampling import mend_sampling_beside_drafts
from nnsight_engine.vllm_backend.steps.handler import StepHandler
from nnsight_engine.vllm_backend.steps.known_ids import KnownIds
from nnsight_engine.vllm_backend.steps.outcome import with_outcome
from nnsight_engine.vllm_backend.steps.replayed_samples import ReplayedSamples
from nnsight_engine.vllm_backend.steps.seeded_chunks import SeededChunksMixin
from nnsight_engine.vllm_backend.steps.step import RequestRows, Step
from nnsight_engine.vllm_backend.traces.stages.links import own_stage


def drafts_of(request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return the number of drafted tokens of each request of a step."""
    return np.array([len(drafts.get(request_id, ())) for request_id in request_ids], np.int64)


class V1Step(Step):
    """A step of the V1 runner.

    Args:
        runner: The runner, its batch final.
        scheduled: The scheduler's output.
        num_padded_rows: See ``Step``.
        is_repeatable: See ``Step``.
    """

    def __init__(
        self, runner: Any, scheduled: SchedulerOutput, num_padded_rows: int, *, is_repeatable: bool
    ) -> None:
        self._batch = batch = runner.input_batch
        self._requests = runner.requests
        self._scheduled = scheduled.num_scheduled_tokens
        self._cached = scheduled.scheduled_cached_reqs
        drafts = scheduled.scheduled_spec_decode_tokens
        has_unknown_ids = bool(drafts) or runner.use_async_scheduling
        self._known = runner.known_ids if has_unknown_ids else None
        super().__init__(
            batch.req_ids,
            batch.num_computed_tokens_cpu[: len(batch.req_ids)],
            num_rows=scheduled.total_num_scheduled_tokens,
            num_padded_rows=num_padded_rows,
            token_ids=runner.input_ids.gpu,
            is_repeatable=is_repeatable,
            num_drafts=drafts_of(batch.req_ids, drafts) if drafts else None,
        )

    @functools.cached_property
    def _num_generated(self) -> dict[str, int]:
        """Number of generated tokens of the requests of earlier steps, by the scheduler's count.

        The runner of an early pipeline stage lacks the last token of a request that returns after a
        preemption.
        """
        return dict(zip(self._cached.req_ids, self._cached.num_output_tokens, strict=True))

    def row_counts(self) -> npt.NDArray[np.integer]:
        """Return the number of rows of each request."""
        return np.fromiter(
            map(self._scheduled.__getitem__, self.request_ids), np.int64, len(self.request_ids)
        )

    def is_sampled(self, rows: RequestRows) -> bool:
        """Return whether a token of the request is sampled, see ``Step``."""
        num_prompt = int(self._requests[rows.request_id].num_prompt_tokens)
        return rows.start + rows.num_rows >= num_prompt + self._num_generated.get(rows.request_id, 0)

    def known_ids(self, rows: RequestRows) -> npt.NDArray[np.int32]:
        """Return the ids of a request's tokens by absolute position."""
        known = self._batch.token_ids_cpu[rows.index] if self._known is None else self._known[rows.request_id]
        ids: npt.NDArray[np.int32] = known
        return ids


class V1RunnerMixin(SeededChunksMixin, AdaptersMixin):
    """Mixin in front of the V1 runner's class.

    Attributes:
        handler: The interventions.
        known_ids: The tokens that the host knows, where its batch has others as well.
    """

    handler: StepHandler
    known_ids: KnownIds
    _samples: ReplayedSamples
    _scheduled: SchedulerOutput

    encoder_cudagraph_manager: Any
    execute_model_state: Any
    intermediate_tensors: Any
    num_prompt_logprobs: dict[str, int]
    is_pooling_model: bool
    requests: dict[str, Any]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model with its interventions."""
        load = super().load_model  # type: ignore[misc]

        def loaded() -> Any:
            load(*args, **kwargs)
            return self.get_model()  # type: ignore[attr-defined]

        self.handler = StepHandler(loaded, self.vllm_config, self.device)  # type: ignore[attr-defined]
        self._samples = ReplayedSamples()
        self.known_ids = KnownIds()
        self._make_room_for_stages()
        if self.device.type == "cpu" and self.vllm_config.speculative_config is not None:  # type: ignore[attr-defined] # vLLM's runner has both
            mend_sampling_beside_drafts()

    def _make_room_for_stages(self) -> None:
        """Allocate the buffers for tensors from earlier stages, which vLLM never does on a CPU.

        Elsewhere vLLM allocates them while it profiles.
        """
        if own_stage() > 0 and self.intermediate_tensors is None:
            self.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(  # type: ignore[attr-defined]
                batch_size=self.max_num_tokens,  # type: ignore[attr-defined]
                dtype=self.vllm_config.model_config.dtype,  # type: ignore[attr-defined]
                device=self.device,  # type: ignore[attr-defined]
            )

    @property
    def due_prompt_logprobs(self) -> Collection[str]:
        """The requests whose prompt logprobs are being computed."""
        return self.num_prompt_logprobs

    def dummy_run(self) -> None:
        """Run the model on one token, without a CUDA graph."""
        self._dummy_run(1, cudagraph_runtime_mode=CUDAGraphMode.NONE)  # type: ignore[attr-defined]

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Register new requests, release finished ones, then run the step."""
        handler = self.handler
        handler.receive(intermediate_tensors)
        self.add_adapters_of_blocks(scheduler_output)
        handler.begin(scheduler_output, self.due_prompt_logprobs)
        self._samples.forget(scheduler_output.finished_req_ids)
        self._scheduled = scheduler_output
        self.known_ids.begin(scheduler_output, handler.interventions.live)
        try:
            output = super().execute_model(scheduler_output, intermediate_tensors, *args, **kwargs)  # type: ignore[misc]
        finally:
            handler.graphs.end()
        if scheduler_output.total_num_scheduled_tokens:
            return self._pooled(output) if self.is_pooling_model else output
        results = handler.reports.end_idle_step(is_alone=is_alone(scheduler_output))
        return output if results is None else attach_results(output, results)

    def _pooled(self, output: Any) -> Any:
        """Return a pooling model's output with its step's results; those of an early stage are in it."""
        outcome = self.handler.leave_pooled()
        is_early = isinstance(output, IntermediateTensors)
        return output if outcome is None or is_early else with_outcome(output, outcome)

    def prepare_zeroing(self) -> None:
        """Make ready to zero blocks of the KV cache, see ``UncleanBlocks``."""
        if self.device.type != "cpu":  # type: ignore[attr-defined] # an attribute of vLLM's runner
            self._init_kv_zero_meta()  # type: ignore[attr-defined] # likewise

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        if self.device.type == "cpu":  # type: ignore[attr-defined] # an attribute of vLLM's runner
            zero_blocks(self, block_ids)
        else:
            super()._zero_block_ids(block_ids)  # type: ignore[misc]

    def _execute_mm_encoder(self, scheduler_output: Any) -> Any:
        """Run the vision encoder, with the operations inside it."""
        execute = super()._execute_mm_encoder  # type: ignore[misc]
        inputs = scheduler_output.scheduled_encoder_inputs
        if not self.handler.enters_encoder(inputs):
            return execute(scheduler_output)
        found: list[Any] = []

        def run(chosen: dict[str, list[int]]) -> None:
            part = copy.copy(scheduler_output)
            part.scheduled_encoder_inputs = chosen
            found.extend(execute(part))

        # A graph would be replayed without hooks.
        graphs, self.encoder_cudagraph_manager = self.encoder_cudagraph_manager, None
        try:
            self.handler.encode(inputs, lambda request_id: self.requests[request_id].mm_features, run)
        finally:
            self.encoder_cudagraph_manager = graphs
        return found

    def _determine_batch_execution_and_padding(self, **options: Any) -> Any:
        decide = super()._determine_batch_execution_and_padding  # type: ignore[misc]
        return self.handler.graphs.choose(decide, options)

    def _model_forward(self, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(super()._model_forward, input_ids, *args, **kwargs)  # type: ignore[misc]
        if self.handler.is_idle:
            return self.handler.plain_forward(forward)
        # The model changes input embeddings in place, so a step with embeddings cannot be run a second time.
        tokens = input_ids if input_ids is not None else kwargs["inputs_embeds"]
        step = V1Step(self, self._scheduled, int(tokens.shape[0]), is_repeatable=input_ids is not None)
        return self.handler.forward(step, forward)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Run the operations at the logits, sample, and attach the step's results to the output."""
        handler, state = self.handler, self.execute_model_state
        logits = None if state is None else state.logits
        changed = handler.on_logits(logits, self.get_model().compute_logits)  # type: ignore[attr-defined]
        if changed is not logits:
            self.execute_model_state = state._replace(logits=changed)
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        outcome = handler.leave()
        return output if outcome is None else with_outcome(output, outcome)

    def _get_prompt_logprobs_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prompt logprobs without those of requests whose rows are computed again."""
        due = self.num_prompt_logprobs
        undone = self.handler.traces.undone
        later = {request_id: due.pop(request_id) for request_id in undone if request_id in due}
        try:
            return super()._get_prompt_logprobs_dict(*args, **kwargs)  # type: ignore[misc]
        finally:
            due.update(later)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        traces = self.handler.traces
        if not traces.in_step:
            return super()._sample(*args, **kwargs)
        batch, mask = self.input_batch, self.discard_request_mask.np  # type: ignore[attr-defined]
        undone = {batch.req_id_to_index[request_id] for request_id in traces.undone}
        mask[list(undone)] = True
        before = self._samples.states(batch) if traces.defers else {}
        output = super()._sample(*args, **kwargs)
        sampled = output.sampled_token_ids
        logprobs_rows = range(0, sampled.numel(), sampled.shape[1])
        self._samples.put_back(output, batch.req_id_to_index, logprobs_rows, traces.undone)
        sampled = sampled[:, :1].clone()
        output.sampled_token_ids = self.handler.on_samples(output.sampled_token_ids)
        for request_id in traces.undone:
            index = batch.req_id_to_index[request_id]
            if index not in undone:
                mask[index] = True
                self._samples.keep(request_id, index, sampled, output, logprobs_rows[index], before)
        return output
