"""Interventions in vLLM's model runner V2, where a step is final in the result of ``prepare_inputs``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.core.work_context import PLAIN
from nnsight_engine.plans.step.graph_table import GraphTable
from nnsight_engine.plans.step.host_arena import to_device
from nnsight_engine.vllm_backend.compat import attach_results, is_alone
from nnsight_engine.vllm_backend.steps.adapters import AdaptersMixin
from nnsight_engine.vllm_backend.steps.handler import StepHandler
from nnsight_engine.vllm_backend.steps.outcome import with_outcome
from nnsight_engine.vllm_backend.steps.tokens import KnownIds, ReplayedSamples
from nnsight_engine.vllm_backend.steps.worker_state import Step


def step_of(batch: Any, known_ids: KnownIds, *, is_repeatable: bool) -> Step:
    """Return the step that vLLM's runner has prepared as ``batch``."""
    return Step(
        batch.req_ids,
        batch.num_computed_tokens_np,
        batch.num_scheduled_tokens,
        num_padded_rows=batch.num_tokens_after_padding,
        token_ids=batch.input_ids,
        known_ids=known_ids,
        prefill_lens=batch.prefill_len_np,
        is_repeatable=is_repeatable,
        num_drafts=batch.num_draft_tokens_per_req if batch.num_draft_tokens else None,
    )


class ModelProxy:
    """Stands for the model while the runner calls it; ``replaced`` has methods by name."""

    def __init__(self, model: Any, **replaced: Callable[..., Any]) -> None:
        self._model = model
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replaced.get("forward", self._model)(*args, **kwargs)


class RunnerMixin(AdaptersMixin):
    handler: StepHandler
    known_ids: KnownIds
    model: Any
    _samples: ReplayedSamples
    _prepared: Step | None = None
    _skipped: npt.NDArray[np.integer] | None = None
    _has_called: bool = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as vLLM does, within a ``StepHandler``, which installs the taps in it."""
        load = super().load_model  # type: ignore[misc]

        def loaded() -> Any:
            load(*args, **kwargs)
            return self.model

        self.handler = StepHandler(loaded, self.vllm_config, self.device)  # type: ignore[attr-defined]
        self._samples = ReplayedSamples()
        self.known_ids = KnownIds()
        state = self.model_state  # type: ignore[attr-defined] # vLLM's runner has it
        state.execute_mm_encoder = functools.partial(self._encode, state, state.execute_mm_encoder)

    def _encode(self, state: Any, execute: Callable[[Any], None], inputs: dict[str, list[int]]) -> None:
        """In place of ``execute_mm_encoder``: encode media, without graphs if operations act inside."""
        if not self.handler.enters_encoder(inputs):
            execute(inputs)
            return
        runner = state.encoder_runner
        # A graph would be replayed without hooks.
        graphs, runner.cudagraph_manager = runner.cudagraph_manager, None
        try:
            self.handler.encode(inputs, state.encoder_cache.mm_features.__getitem__, execute)
        finally:
            runner.cudagraph_manager = graphs

    @property
    def due_prompt_logprobs(self) -> Collection[str]:
        """The requests whose prompt logprobs vLLM has not computed to the end."""
        worker = self.prompt_logprobs_worker  # type: ignore[attr-defined] # vLLM's runner has it
        due: Collection[str] = () if worker is None else worker.in_progress_prompt_logprobs.keys()
        return due

    def dummy_run(self) -> None:
        self._dummy_run(1)  # type: ignore[attr-defined]

    def execute_model(
        self,
        scheduler_output: Any,
        intermediate_tensors: Any = None,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run a step as vLLM does, in which the model is a proxy that runs the interventions."""
        execute = functools.partial(
            super().execute_model,  # type: ignore[misc]
            scheduler_output,
            intermediate_tensors,
            *args,
            **kwargs,
        )
        if dummy_run:
            return execute(dummy_run=True)
        handler, model = self.handler, self.model
        handler.receive(intermediate_tensors)
        self.add_adapters_of_blocks(scheduler_output)
        handler.begin_step(scheduler_output, self.due_prompt_logprobs)
        self._samples.forget(scheduler_output.finished_req_ids)
        self.known_ids.begin_step(scheduler_output, handler.interventions.live)
        self.model = ModelProxy(model, forward=functools.partial(self._forward, model))
        self._has_called = False
        try:
            with handler.graphs.constraining(self.cudagraph_manager, self._replay):  # type: ignore[attr-defined] # vLLM's runner has it
                output = execute()
        finally:
            self.model, self._prepared = model, None
            handler.graphs.end_step()
        if not scheduler_output.total_num_scheduled_tokens:
            results = handler.reports.end_idle_step(is_alone=is_alone(scheduler_output))
            return output if results is None else attach_results(output, results)
        if not self._has_called:  # a full graph was replayed
            handler.counts.steps[PLAIN] += 1
        return output

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a step as vLLM does, and keep it for ``_forward`` if a request intervenes."""
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        if not self.handler.is_idle:
            # The model changes input embeddings in place, so it cannot be run on them a second time.
            is_repeatable = not self.uses_inputs_embeds  # type: ignore[attr-defined]
            self._prepared = step_of(batch, self.known_ids, is_repeatable=is_repeatable)
        return batch

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture CUDA graphs as vLLM does, and those with interventions; return the bytes they take."""
        capture = functools.partial(super().capture_model, profile_only=profile_only)  # type: ignore[misc]
        if profile_only:
            return int(capture())
        with self.handler.graphs.capturing(self.cudagraph_manager):  # type: ignore[attr-defined] # vLLM's runner has it
            return int(capture())

    def profile_cudagraph_memory(self) -> int:
        """Return vLLM's estimate, twice if each full graph has another one with interventions."""
        vllms_bytes = int(super().profile_cudagraph_memory())  # type: ignore[misc]
        captures = self.handler.graphs.captures(self.compilation_config.cudagraph_mode)  # type: ignore[attr-defined] # as above
        return 2 * vllms_bytes if captures else vllms_bytes

    def shutdown(self) -> None:
        if hasattr(self, "handler"):
            self.handler.graphs.captured = None
        super().shutdown()  # type: ignore[misc]

    def _replay(self, table: GraphTable, run: Callable[[], Any]) -> Any:
        self._has_called = True
        return self.handler.replay(self._prepared, table, run)

    def _forward(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with interventions if the step has any; called in place of the model."""
        self._has_called = True
        run = functools.partial(model, *args, **kwargs)
        step = self._prepared
        return self.handler.plain_forward(run) if step is None else self.handler.forward(step, run)

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Sample as vLLM does, from logits that operations have changed, and offer the samples to blocks."""
        handler, model = self.handler, self.model

        def compute_logits(rows: torch.Tensor) -> Any:
            return handler.on_logits(model.compute_logits(rows), model.compute_logits)

        self.model = ModelProxy(model, compute_logits=compute_logits)
        try:
            sampled = super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]
        finally:
            self.model = model
        if not handler.traces.in_step or handler.step is None:
            return sampled
        output, num_sampled, num_rejected = sampled
        return self._offered(output, num_sampled, num_rejected, input_batch, handler.step)

    def _offered(
        self, output: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, batch: Any, step: Step
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Offer the samples to blocks; return what ``sample`` does, with no tokens for undone requests."""
        traces = self.handler.traces
        rows = {request_id: row for row, request_id in enumerate(batch.req_ids)}
        undone_before = set(traces.undone)
        logprobs_rows = step.logits_ends()
        self._samples.put_back(output, rows, logprobs_rows, undone_before)
        sampled = output.sampled_token_ids[:, :1].clone()
        output.sampled_token_ids = self.handler.on_samples(output.sampled_token_ids)
        self.handler.note_samples(output.sampled_token_ids)
        undone = [request_id for request_id in traces.undone if request_id in rows]
        if not undone:
            return output, num_sampled, num_rejected
        for request_id in undone:
            if request_id not in undone_before:
                row = rows[request_id]
                self._samples.keep(request_id, row, sampled, output, int(logprobs_rows[row]))
        # Rows that are rejected are computed again.
        indexes = np.array([rows[request_id] for request_id in undone], np.int64)
        index = to_device(indexes, num_sampled.device)
        counts = to_device(batch.num_scheduled_tokens[indexes], num_sampled.device)
        num_sampled = num_sampled.index_fill(0, index, 0)
        num_rejected = num_rejected.index_copy(0, index, counts.to(num_rejected.dtype))
        self._skip_prompt_logprobs(batch.idx_mapping_np[indexes])
        return output, num_sampled, num_rejected

    def _skip_prompt_logprobs(self, slots: npt.NDArray[np.integer]) -> None:
        """Leave out the prompt logprobs of requests whose rows are computed again."""
        uses = self.prompt_logprobs_worker.uses_prompt_logprobs  # type: ignore[attr-defined] # vLLM's runner has it
        self._skipped = slots[uses[slots]]
        uses[self._skipped] = False

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End the step as vLLM does, with the results of its interventions."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._skipped is not None:
            self.prompt_logprobs_worker.uses_prompt_logprobs[self._skipped] = True  # type: ignore[attr-defined] # as above
            self._skipped = None
        outcome = self.handler.leave()
        return output if outcome is None else with_outcome(output, outcome)

    def pool(self) -> Any:
        output = super().pool()  # type: ignore[misc]
        outcome = self.handler.leave_pooled()
        return output if outcome is None else with_outcome(output, outcome)
