"""Steps of the runner that go on without a block: no token leaves, and the repeated step gives the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

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

    def __init__(self, *, leaves: bool = False) -> None:
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


def _sampled(rows: list[list[int]], scale: float = 1.0) -> SamplerOutput:
    """Return tokens with a row for each request, and logprobs with one for each token."""
    tokens = torch.tensor(rows, dtype=torch.int32)
    flat = tokens[tokens >= 0]
    ranks = flat.clone()
    logprobs = LogprobsTensors(flat[:, None].repeat(1, 3), flat[:, None].repeat(1, 3) * scale, ranks)
    return SamplerOutput(tokens, logprobs)


class _Vllm:
    """Draws tokens as vLLM does, from each request's own stream."""

    input_batch: Any
    num_prompt_logprobs: dict[str, int]

    def _get_prompt_logprobs_dict(self, values: list[float]) -> dict[str, Any]:
        """Return those of each request once, as vLLM does."""
        return {name: values[: self.num_prompt_logprobs.pop(name)] for name in list(self.num_prompt_logprobs)}

    def _sample(self, logits: torch.Tensor) -> SamplerOutput:
        generators = self.input_batch.generators.values()
        return _sampled([torch.randint(0, 1000, (1,), generator=one).tolist() for one in generators])


class _Runner(V1RunnerMixin, _Vllm):
    def __init__(self, traces: WorkerTraces) -> None:
        self.handler: Any = SimpleNamespace(traces=traces, on_samples=traces.on_samples)
        self._samples = ReplayedSamples()
        names = {"other": 0, "own": 1}
        generators = {row: torch.Generator().manual_seed(row) for row in names.values()}
        self.input_batch = SimpleNamespace(req_id_to_index=names, generators=generators, num_reqs=2)
        self.discard_request_mask = SimpleNamespace(np=np.zeros(2, bool))

    def sampled(self) -> list[int]:
        """Return what leaves of a step, and -1 for what does not."""
        self.discard_request_mask.np[:] = False
        output = self._sample(torch.zeros(2, 4))
        assert output.logprobs_tensors.logprobs[:, 0].tolist() == output.sampled_token_ids[:, 0].tolist()
        left: list[int] = np.where(self.discard_request_mask.np, -1, output.sampled_token_ids[:, 0]).tolist()
        return left


def test_prompt_logprobs_of_a_step_that_is_undone_come_with_its_repetition() -> None:
    traces = _Traces()
    runner = _Runner(traces)
    runner.num_prompt_logprobs = {"own": 1, "other": 2}
    traces.sandboxes.undone = ["own", "without"]
    assert runner._get_prompt_logprobs_dict([0.0, 1.0]) == {"other": [0.0, 1.0]}
    traces.sandboxes.undone = []
    assert runner._get_prompt_logprobs_dict([2.0, 3.0]) == {"own": [2.0]}
    assert runner._get_prompt_logprobs_dict([4.0, 5.0]) == {}


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_token_that_did_not_leave_leaves_with_the_repetition(*, is_shown: bool) -> None:
    plain = _Runner(_Traces())
    first, second, third = (plain.sampled() for _ in range(3))
    traces = _Traces(leaves=is_shown)
    runner, reports = _Runner(traces), TraceReports(traces)
    if not is_shown:  # the block has left the step before
        traces.sandboxes.undone, traces.sandboxes.waiting = ["own"], frozenset({"own"})
    assert runner.sampled() == [first[0], -1]
    assert traces.shown == first
    results = reports.end_step()
    assert results is not None
    assert (results.undone, results.waiting) == (["own"], frozenset({"own"}))
    traces.leaves, traces.sandboxes.waiting = False, frozenset()
    assert runner.sampled() == [second[0], first[1]], "its random stream was put back"
    results = reports.end_step()
    assert results is not None
    assert (results.undone, results.waiting) == ([], frozenset())
    assert runner.sampled() == [third[0], second[1]]
    assert reports.end_step() is None, "nothing is new"


def test_a_sample_comes_back_once_in_any_row_beside_drafts_unless_its_request_ended() -> None:
    kept, first = ReplayedSamples(), _sampled([[11], [12], [13]])
    for name, row in (("own", 1), ("gone", 2)):
        kept.keep(name, row, first.sampled_token_ids, first, row, {})
    kept.forget({"gone"})
    again = _sampled([[21, 22], [23, -1], [24, -1]], scale=9.0)
    rows = {"own": 2, "other": 0, "gone": 1}
    kept.put_back(again, rows, (0, 2, 3), {"own"})
    assert again.sampled_token_ids.tolist() == [[21, 22], [23, -1], [24, -1]], "it is left out once more"
    kept.put_back(again, rows, (0, 2, 3), ())
    assert again.sampled_token_ids.tolist() == [[21, 22], [23, -1], [12, -1]]
    ids, logprobs, ranks = again.logprobs_tensors[:3]
    assert logprobs[:, 0].tolist() == [189, 198, 207, 12]
    assert ids[3].tolist() == [12, 12, 12]
    assert ranks.tolist() == [21, 22, 23, 12]
    later = _sampled([[31]])
    kept.put_back(later, {"own": 0}, range(1), ())
    assert later.sampled_token_ids.item() == 31


def test_the_end_of_a_pause_is_reported_without_a_block() -> None:
    traces = _Traces()
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
