"""Values that an early pipeline stage reads arrive in the plan of the last stage, or the request fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sequence import IntermediateTensors

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensor_bytes import DTYPES
from nnsight_engine.plans.records import StepResults
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.builder import StepBuilder
from nnsight_engine.plans.step.collection import StepCollection, step_delivery
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.ledger import ByteLedger
from nnsight_engine.plans.step.patterns import AttentionForm
from nnsight_engine.plans.step.plan import Span, StepPlan
from nnsight_engine.plans.step.registrar import Registrar
from nnsight_engine.plans.step.stage import WHOLE, Stage
from nnsight_engine.plans.step.stage_results import (
    StageResults,
    add_results,
    results_of_stage,
    with_silent_stages,
)
from nnsight_engine.vllm_backend.steps.stage_transport import take_results, with_results
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import compiled, tensors_of

WIDTH, PROMPT, NUM_LAYERS = 4, [7, 8, 9], 3
SPEC = tiny_spec(num_layers=NUM_LAYERS, hidden_size=WIDTH)
STAGES = [Stage(0, 1), Stage(1, 2), Stage(2)]
CAPTURES: list[dict[str, Any]] = [
    {"op": "capture", "name": "half", "at": "layers.*.output", "dtype": "float16"},
    {"op": "capture", "name": "ends", "at": ["layers.2.output", "layers.0.output"], "reduce": "mean"},
    {"op": "probe", "name": "score", "at": "layers.*.output", "weights": [1.0] * WIDTH},
]


class Worker:
    """The requests and plans of one worker, on a model whose layers give constants."""

    def __init__(self, stage: Stage, spec: ModelSpec = SPEC) -> None:
        self.stage, self.spec = stage, spec
        device = torch.device("cpu")
        ledger = ByteLedger(max_request_bytes=1 << 20, max_engine_bytes=1 << 20)
        dtype = DTYPES[spec.dtype]
        context = StepContext(spec, dtype, device, ledger, lambda _: AttentionForm(1.0), stage=stage)
        self._registrar, self._builder = Registrar(context), StepBuilder(context)
        self.requests: list[ActiveRequest] = []

    def add(self, request_id: str, operations: Sequence[dict[str, Any]]) -> None:
        request = compiled(*operations, spec=self.spec, prompt=PROMPT)
        self.requests.append(self._registrar.register(request_id, request.plan, tensors_of(request)))

    def run(self) -> StepPlan:
        spans = [
            Span(request, index * len(PROMPT), len(PROMPT), 0, np.array(PROMPT, np.int32))
            for index, request in enumerate(self.requests)
        ]
        plan = self._builder.plan(spans)
        for layer in range(NUM_LAYERS):
            if self.stage.has(layer + 1):
                values = torch.arange(len(self.requests) * len(PROMPT) * WIDTH, dtype=torch.float32)
                scaled = values.view(-1, WIDTH) * 10**layer
                plan.run(layer + 1, scaled.to(DTYPES[self.spec.dtype]), None)
        return plan


def workers(
    stages: Sequence[Stage], requests: Mapping[str, Sequence[dict[str, Any]]], spec: ModelSpec = SPEC
) -> list[Worker]:
    found = [Worker(stage, spec) for stage in stages]
    for worker in found:
        for request_id, operations in requests.items():
            worker.add(request_id, operations)
    return found


def sent(early: Sequence[Worker]) -> list[StageResults]:
    """Return what the last stage receives."""
    received: list[StageResults] = []
    for worker in early:
        own = results_of_stage(worker.run(), worker.stage, SPEC)
        output = with_results(IntermediateTensors({"hidden_states": torch.zeros(2)}), [*received, own])
        received = take_results(output)
        assert list(output.tensors) == ["hidden_states"], "vLLM's runner knows no others"
    return received


def collected(plan: StepPlan) -> StepResults:
    StepCollection(lambda _: None, None).collect(plan)
    return step_delivery(plan).results([[1]] * 2, {"r": 0, "s": 1})


def test_results_of_stages_are_those_of_one_worker() -> None:
    requests = {"r": CAPTURES, "s": CAPTURES[:2]}
    (whole,) = workers([WHOLE], requests)
    *early, last = workers(STAGES, requests)
    received = sent(early)
    plan = last.run()
    for results in received:
        add_results(plan, results, SPEC)
    found, wanted = collected(plan), collected(whole.run())
    assert found.failures == {}
    assert found.records == wanted.records
    assert {len(records) for records in found.records.values()} == {2, 3}


def test_a_write_beyond_float16_on_an_early_stage_fails_its_request() -> None:
    half = dataclasses.replace(SPEC, dtype="float16")
    steer = {"op": "steer", "at": "layers.1.output", "vector": [1.0] * WIDTH, "mode": "norm_match"}
    requests = {"r": [steer | {"scale": 0.1}, *CAPTURES], "s": [steer | {"scale": 60000.0}, *CAPTURES]}
    *early, last = workers(STAGES, requests, half)
    received = sent(early)
    plan = last.run()
    for results in received:
        add_results(plan, results, half)
    found = collected(plan)
    assert [(key, one.code) for key, one in found.failures.items()] == [("s", "not_finite")]
    assert len(found.records["r"]) == len(CAPTURES)


def test_a_request_that_only_one_stage_has_given_up_does_not_disturb_others() -> None:
    *early, last = workers(STAGES, {"r": CAPTURES, "s": CAPTURES})
    (whole,) = workers([WHOLE], {"r": CAPTURES, "s": CAPTURES})
    last.requests[0].fail("intervention_failed", "on the last stage")
    received = sent(early)
    plan = last.run()
    for results in received:
        add_results(plan, results, SPEC)
    found = collected(plan)
    assert found.records == {"s": collected(whole.run()).records["s"]}
    assert found.failures["r"].message == "on the last stage"


def test_a_failure_on_an_early_stage_is_the_requests() -> None:
    *early, last = workers(STAGES, {"r": CAPTURES, "s": CAPTURES})
    early[1].requests[1].fail("wrong_width", "on the second stage")
    received = sent(early)
    plan = last.run()
    for results in received:
        add_results(plan, results, SPEC)
    found = collected(plan)
    assert found.failures.keys() == {"s"}
    assert found.failures["s"].code == "wrong_width"
    assert found.records.keys() == {"r"}


@pytest.mark.parametrize("silent", [0, 1])
def test_a_stage_that_sends_nothing_fails_requests(silent: int) -> None:
    steer = {"op": "steer", "at": "layers.0.output", "vector": [1.0] * WIDTH}
    *early, last = workers(STAGES, {"r": [steer], "s": CAPTURES})
    received = sent([worker for index, worker in enumerate(early) if index != silent])
    plan = last.run()
    for results in with_silent_stages(received, last.stage):
        add_results(plan, results, SPEC)
    failures = collected(plan).failures
    assert failures.keys() == {"r", "s"}
    assert "did not run" in failures["r"].message


def test_sites_belong_to_one_stage_each() -> None:
    keys = [*range(NUM_LAYERS + 1)]
    assert [[stage.has(key) for stage in STAGES].count(True) for key in keys] == [1] * len(keys)
    assert STAGES[0].has(0)
    assert STAGES[0].has(1)
    assert STAGES[1].has(2)
