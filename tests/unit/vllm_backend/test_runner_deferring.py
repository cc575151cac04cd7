"""The runner where a step goes on without a block: no token leaves, and the next step gives the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nnsight_engine.vllm_backend.steps.replayed_samples import ReplayedSamples
from nnsight_engine.vllm_backend.steps.runner_v1 import V1RunnerMixin
from nnsight_engine.vllm_backend.steps.trace_reports import TraceReports
from nnsight_engine.vllm_backend.traces.worker_traces import WorkerTraces


class _Sandboxes:
    in_step = True

    def __init__(self) -> None:
        self.undone: list[str] = []
        self.waiting: frozenset[str] = frozenset()
        self.throttled: frozenset[str] = frozenset()

    def wait_for_any(self, wait_s: float) -> None:
        """Have nobody to wait for."""


class _Traces(WorkerTraces):
    """Blocks, of which one leaves the step when it is shown its token."""

    def __init__(self, *, leaves: bool) -> None:
        self.sandboxes: Any = _Sandboxes()
        self.leaves = leaves
        self.is_empty = False
        self.shown: list[int] = []

    @property
    def in_step(self) -> bool:
        return True

    @property
    def idle(self) -> bool:
        return self.is_empty

    def on_samples(self, samples: torch.Tensor) -> torch.Tensor:
        self.shown = samples[:, 0].tolist()
        if self.leaves:
            self.sandboxes.undone = ["own"]
            self.sandboxes.waiting = frozenset({"own"})
        return samples

    def end(self) -> list[str]:
        self.sandboxes.undone = []
        return []

    def reports(self) -> dict[str, Any]:
        return {}


class _Vllm:
    """Draws tokens as vLLM does, from each request's own stream."""

    input_batch: Any
    num_prompt_logprobs: dict[str, int]

    def _get_prompt_logprobs_dict(self, values: list[float]) -> dict[str, Any]:
        """Return those of each request once, as vLLM does."""
        return {name: values[: self.num_prompt_logprobs.pop(name)] for name in list(self.num_prompt_logprobs)}

    def _sample(self, logits: torch.Tensor) -> Any:
        drawn = [torch.randint(0, 1000, (1,), generator=one) for one in self.input_batch.generators.values()]
        tokens = torch.stack(drawn).to(torch.int32)
        return SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=None)


class _Runner(V1RunnerMixin, _Vllm):
    def __init__(self, traces: WorkerTraces) -> None:
        self.handler: Any = SimpleNamespace(traces=traces, on_samples=traces.on_samples)
        self._samples = ReplayedSamples()
        names = {"other": 0, "own": 1}
        generators = {row: torch.Generator().manual_seed(row) for row in names.values()}
        self.input_batch = SimpleNamespace(req_id_to_index=names, generators=generators, num_reqs=2)
        self.discard_request_mask = SimpleNamespace(np=np.zeros(2, bool))

    def sampled(self) -> list[int]:
        """Return what leaves of a step, and what a block is shown in place of what does not."""
        self.discard_request_mask.np[:] = False
        output = self._sample(torch.zeros(2, 4))
        tokens: list[int] = output.sampled_token_ids[:, 0].tolist()
        return [
            -1 if gone else token for token, gone in zip(tokens, self.discard_request_mask.np, strict=True)
        ]


def test_prompt_logprobs_of_a_step_that_is_undone_come_with_its_repetition() -> None:
    traces = _Traces(leaves=False)
    runner = _Runner(traces)
    runner.num_prompt_logprobs = {"own": 1, "other": 2}
    traces.sandboxes.undone = ["own", "without"]
    assert runner._get_prompt_logprobs_dict([0.0, 1.0]) == {"other": [0.0, 1.0]}
    traces.sandboxes.undone = []
    assert runner._get_prompt_logprobs_dict([2.0, 3.0]) == {"own": [2.0]}
    assert runner._get_prompt_logprobs_dict([4.0, 5.0]) == {}


def test_a_token_that_was_shown_is_the_one_that_leaves_later() -> None:
    plain = _Runner(_Traces(leaves=False))
    first, second = plain.sampled(), plain.sampled()
    traces = _Traces(leaves=True)
    runner, reports = _Runner(traces), TraceReports(traces)
    assert runner.sampled() == [first[0], -1]
    assert traces.shown == first
    results = reports.end_step()
    assert results is not None
    assert (results.undone, results.waiting) == (["own"], frozenset({"own"}))
    traces.leaves = False
    traces.sandboxes.waiting = frozenset()
    assert runner.sampled() == [second[0], first[1]]
    results = reports.end_step()
    assert results is not None
    assert (results.undone, results.waiting) == ([], frozenset())
    assert runner.sampled()[1] == second[1]
    assert reports.end_step() is None, "nothing is new"


def test_a_block_that_has_left_before_has_no_token() -> None:
    plain = _Runner(_Traces(leaves=False))
    first = plain.sampled()
    traces = _Traces(leaves=False)
    runner = _Runner(traces)
    traces.sandboxes.undone = ["own"]
    assert runner.sampled() == [first[0], -1]
    traces.sandboxes.undone = []
    assert runner.sampled()[1] == first[1], "its stream was put back"


def test_the_end_of_a_pause_is_reported_without_a_block() -> None:
    traces = _Traces(leaves=False)
    reports = TraceReports(traces)
    traces.sandboxes.throttled = frozenset({"many"})
    results = reports.end_step()
    assert results is not None
    assert results.throttled == frozenset({"many"})
    traces.is_empty = True
    assert reports.end_idle_step(is_alone=True) is None, "nothing is new"
    traces.sandboxes.throttled = frozenset()
    results = reports.end_idle_step(is_alone=True)
    assert results is not None
    assert results.throttled == frozenset()
    assert reports.end_idle_step(is_alone=True) is None
