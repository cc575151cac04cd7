"""Attention patterns: what compiling refuses and counts, what the worker keeps and computes, results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.plans.collect.results import CollectedCapture
from nnsight_engine.plans.request_plan import CompiledRequest, PlannedSite
from nnsight_engine.plans.step.plan import Span
from nnsight_engine.plans.step.read_kernels import AttentionForm, AttentionKeyStore, ComputePattern
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans import compiling
from tests.unit.plans.compiling import captured_bytes
from tests.unit.plans.toy_engine import FORM, StepEngine, patterns

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 3
SPEC = tiny_spec(num_layers=2, hidden_size=12, num_heads=HEADS, num_kv_heads=KV_HEADS, max_capture_bytes=8192)
PROMPT = [10, 11, 12, 13, 11]
KEY_BYTES = KV_HEADS * HEAD_DIM * 4


def capture(at: str | list[str] = "layers.0.attn.pattern", **fields: Any) -> dict[str, Any]:
    return {"op": "capture", "at": at} | fields


def compiled(*raw: dict[str, Any], prompt: list[int] = PROMPT, stream: bool = False) -> CompiledRequest:
    return compiling.compiled(*raw, spec=SPEC, prompt=prompt, max_tokens=20, stream=stream)


def test_a_pattern_of_generated_positions_still_needs_the_prompt_computed() -> None:
    assert compiled(capture(where={"phase": "generated"})).reads_prompt
    assert not compiled(capture("layers.0.output", where={"phase": "generated"})).reads_prompt


@pytest.mark.parametrize(
    ("fields", "num_numbers", "num_keys"),
    [
        ({}, 5 * HEADS * 5, 5),
        ({"reduce": "last"}, HEADS * 5, 5),
        ({"where": {"positions": [0, 2]}}, 2 * HEADS * 3, 3),
        ({"where": {"phase": "generated"}}, 0, 5),
        ({"where": {"range": [1, 4], "tokens": [11]}}, HEADS * 2, 4),
    ],
)
def test_the_prompt_is_counted_with_its_keys(fields: dict[str, Any], num_numbers: int, num_keys: int) -> None:
    patterns = capture("layers.*.attn.pattern", dtype="float16", **fields)
    assert captured_bytes(patterns, spec=SPEC, prompt=PROMPT) == 2 * (num_numbers * 2 + num_keys * KEY_BYTES)


def test_keys_of_a_layer_are_counted_once() -> None:
    first, second = capture(name="a"), capture(name="b", where={"positions": [0]})
    one = captured_bytes(first, spec=SPEC, prompt=PROMPT)
    both = captured_bytes(first, second, spec=SPEC, prompt=PROMPT)
    assert both - one == HEADS * 4


def pattern(query: torch.Tensor, keys: torch.Tensor, position: int, form: AttentionForm) -> torch.Tensor:
    """Return one query's pattern, ``[heads, position + 1]``."""
    return patterns(query.expand(position + 1, -1, -1), keys[: position + 1], form)[-1]


@pytest.mark.parametrize("form", [AttentionForm(0.5), FORM, AttentionForm(1.3, window=1)])
@pytest.mark.parametrize("scratch_bytes", [1, 200, 1 << 20])
def test_patterns_are_a_masked_softmax(form: AttentionForm, scratch_bytes: int) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(9, HEADS, HEAD_DIM), torch.randn(8, KV_HEADS, HEAD_DIM)
    store = AttentionKeyStore(torch.empty(8, KV_HEADS, HEAD_DIM))
    store.store(0, keys)
    rows, positions = torch.tensor([1, 4, 8]), [0, 3, 6]
    out = torch.zeros(3, HEADS, 7)
    kernel = ComputePattern(store, form, rows, torch.tensor(positions), positions, out, scratch_bytes)
    kernel.run(queries, None)
    for row, position in enumerate(positions):
        expected = pattern(queries[rows[row]], keys, position, form)
        torch.testing.assert_close(out[row, :, : position + 1], expected)
        assert not out[row, :, position + 1 :].any()


class Worker(StepEngine):
    """A request in the worker, fed with queries and keys in steps."""

    def __init__(self, request: CompiledRequest, *, max_bytes: int = 1 << 20) -> None:
        super().__init__(SPEC, max_bytes=max_bytes, has_arena=True)
        self.compiled = request
        self.request = self.admit("r", request)
        self.queries, self.keys = torch.randn(64, HEADS, HEAD_DIM), torch.randn(64, KV_HEADS, HEAD_DIM)

    def step(self, start: int, stop: int) -> bool:
        """Compute positions; return whether attention had to be met."""
        # The request's rows are not the first of the step.
        span = Span(self.request, 2, stop - start, start, np.zeros(64, np.int32))
        plan = self.builder.plan([span])
        sites = plan.hook_sites()
        other = torch.full((2, 1, HEAD_DIM), torch.nan)
        for site in sites:
            queries = torch.cat([other.expand(-1, HEADS, -1), self.queries[start:stop]])
            plan.run(site, queries, torch.cat([other.expand(-1, KV_HEADS, -1), self.keys[start:stop]]))
        self.deliver(plan, [], {})
        return bool(sites)

    def expected(self, position: int) -> torch.Tensor:
        return pattern(self.queries[position], self.keys, position, FORM)


def values(result: CollectedCapture, point: str = "layers.0.attn.pattern") -> torch.Tensor:
    tensor = result.points[point]
    return torch.from_numpy(np.frombuffer(tensor.data, np.float32).copy()).reshape(tensor.shape)


def test_a_stream_carries_each_row_with_its_token() -> None:
    worker = Worker(compiled(capture(), stream=True))
    collector = worker.collector(worker.compiled, PROMPT)
    shapes = []
    for token, (start, stop) in enumerate([(0, 5), (5, 6), (6, 7)]):
        worker.step(start, stop)
        payload = worker.outbox.take_payload("r", final=False)
        assert payload is not None
        collector.add(payload)
        part = collector.take_part(token + 1)
        assert part is not None
        (result,) = part.results
        assert isinstance(result, CollectedCapture)
        shapes.append((result.positions, values(result).shape))
        torch.testing.assert_close(values(result)[-1], worker.expected(stop - 1))
    assert shapes == [
        ([0, 1, 2, 3, 4], (5, HEADS, 5)),
        ([5], (1, HEADS, 6)),
        ([6], (1, HEADS, 7)),
    ]


def test_a_row_that_is_ahead_of_the_delivered_tokens_waits_for_its_own() -> None:
    worker = Worker(compiled(capture(), stream=True))
    collector = worker.collector(worker.compiled, PROMPT)
    for start, stop in [(0, 5), (5, 6), (6, 7)]:
        worker.step(start, stop)
    payload = worker.outbox.take_payload("r", final=False)
    assert payload is not None
    collector.add(payload)
    positions = []
    for num_tokens in (1, 1, 3):
        part = collector.take_part(num_tokens)
        (result,) = (None,) if part is None else part.results
        positions.append(result.positions if isinstance(result, CollectedCapture) else [])
    assert positions == [[0, 1, 2, 3, 4], [], [5, 6]]


def test_attention_is_met_until_the_last_row_and_keys_are_let_go() -> None:
    worker = Worker(compiled(capture(where={"positions": [3]})))
    assert worker.step(0, 3)
    assert worker.ledger.total_bytes == 4 * KEY_BYTES
    assert worker.step(3, 5)
    assert not worker.step(5, 6)
    assert worker.ledger.total_bytes == HEADS * 4 * 4
    assert not worker.step(6, 7)
    # After a preemption nothing is left to do for what was delivered.
    assert not worker.step(0, 5)
    assert worker.request.failure is None


def test_keys_missing_from_the_front_fail_the_request() -> None:
    worker = Worker(compiled(capture()))
    worker.step(2, 5)
    assert worker.request.failure is not None
    assert worker.request.failure.code == "intervention_failed"
    assert "from position 0 on" in worker.request.failure.message


def test_bytes_are_counted_before_anything_is_allocated() -> None:
    limit = 5 * KEY_BYTES + 5 * HEADS * 5 * 4
    worker = Worker(compiled(capture()), max_bytes=limit)
    failures = []
    for start, stop in [(0, 5), (5, 6)]:
        worker.step(start, stop)
        failures.append(worker.request.failure)
        assert worker.ledger.total_bytes == limit
    assert [failure and failure.code for failure in failures] == [None, "capture_too_large"]


def test_a_layer_that_cannot_be_computed_fails_its_request() -> None:
    worker = Worker(compiled(capture()))
    site = PlannedSite("attn.pattern", 0)
    plan = worker.builder.plan([Span(worker.request, 0, 5, 0, np.zeros(64, np.int32))])
    plan.run(site, worker.queries[:5], None)
    assert worker.request.failure is not None
    assert "another layer's keys" in worker.request.failure.message


def test_a_request_that_patterns_fail_takes_nothing_for_its_other_reads() -> None:
    """The small reads of a request would fit; what fails it is known before they are allocated."""
    reads = (capture("layers.0.output", name="rows"), capture("layers.0.output", name="l", reduce="last"))
    worker = Worker(compiled(capture(), *reads), max_bytes=4 * KEY_BYTES)
    plan = worker.builder.plan([Span(worker.request, 0, 1, 0, np.zeros(64, np.int32))])
    assert worker.request.failure is not None
    assert worker.request.failure.code == "capture_too_large"
    assert (plan.reads, worker.ledger.total_bytes, worker.request.reductions) == ([], 0, set())
    worker.builder.give_back(plan)
    assert worker.ledger.total_bytes == 0


@pytest.mark.parametrize("num_bytes", [0, 47, 48, 96, 144, 191, 192, 480])
def test_reads_are_counted_whole_or_not_at_all(num_bytes: int) -> None:
    """Two reductions of 48 bytes a row, and what they are made of, whatever the limit."""
    reads = [capture("layers.0.output", name=name, reduce="last") for name in ("a", "b")]
    worker = Worker(compiled(*reads), max_bytes=num_bytes)
    plan = worker.builder.plan([Span(worker.request, 0, 5, 0, np.zeros(64, np.int32))])
    fits = num_bytes >= 4 * 48
    assert (worker.request.failure is None) == fits
    assert worker.ledger.total_bytes == (4 * 48 if fits else 0)
    assert (bool(plan.reads), worker.request.reductions) == ((True, {0, 1}) if fits else (False, set()))
    worker.builder.give_back(plan)
    assert worker.ledger.total_bytes == (2 * 48 if fits else 0)
