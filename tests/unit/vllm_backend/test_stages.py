"""What pipeline stages send each other: what was read, failures, and a traced request's own rows."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sequence import IntermediateTensors

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensors import DTYPES
from nnsight_engine.plans.records import StepResults
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.builder import StepBuilder
from nnsight_engine.plans.step.context import WHOLE, ByteLedger, Stage, StepContext
from nnsight_engine.plans.step.delivery import StepCollection, step_delivery
from nnsight_engine.plans.step.plan import Span, StepPlan
from nnsight_engine.plans.step.read_kernels import AttentionForm
from nnsight_engine.plans.step.registrar import Registrar
from nnsight_engine.plans.step.stage_results import (
    StageResults,
    add_results,
    results_of_stage,
    with_silent_stages,
)
from nnsight_engine.serialization import decode, encode
from nnsight_engine.vllm_backend.steps.outcome import take_results, with_results
from nnsight_engine.vllm_backend.traces.errors import StageError
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.row_payloads import (
    RemoteValue,
    RowPayloads,
    RowsPlaceholder,
    RowStore,
)
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
STEER: dict[str, Any] = {"op": "steer", "at": "layers.0.output", "vector": [1.0] * WIDTH}
Operations = Mapping[str, Sequence[dict[str, Any]]]


class Worker:
    """The requests and plans of one worker, on a model whose layers give constants."""

    def __init__(self, stage: Stage, operations: Operations, spec: ModelSpec) -> None:
        self.stage, self.dtype = stage, DTYPES[spec.dtype]
        ledger = ByteLedger(max_request_bytes=1 << 20, max_engine_bytes=1 << 20)
        device = torch.device("cpu")
        context = StepContext(spec, self.dtype, device, ledger, lambda _: AttentionForm(1.0), stage=stage)
        registrar, self._builder = Registrar(context), StepBuilder(context)
        self.requests: dict[str, ActiveRequest] = {}
        for name, raw in operations.items():
            request = compiled(*raw, spec=spec, prompt=PROMPT)
            self.requests[name] = registrar.register(name, request.plan, tensors_of(request))

    def run(self) -> StepPlan:
        plan = self._builder.plan(
            [
                Span(request, index * len(PROMPT), len(PROMPT), 0, np.array(PROMPT, np.int32))
                for index, request in enumerate(self.requests.values())
            ]
        )
        for layer in range(NUM_LAYERS):
            if self.stage.has(layer + 1):
                values = torch.arange(len(self.requests) * len(PROMPT) * WIDTH, dtype=torch.float32)
                plan.run(layer + 1, (values.view(-1, WIDTH) * 10**layer).to(self.dtype), None)
        return plan


def over_stages(
    operations: Operations,
    meddle: Callable[[list[Worker]], None] = lambda _: None,
    *,
    stages: Sequence[Stage] = STAGES,
    silent: int | None = None,
    spec: ModelSpec = SPEC,
) -> StepResults:
    """Return the results of a step over stages, of which one may send nothing."""
    workers = [Worker(stage, operations, spec) for stage in stages]
    meddle(workers)
    received: list[StageResults] = []
    for index, worker in enumerate(workers[:-1]):
        if index != silent:
            own = results_of_stage(worker.run(), worker.stage, spec)
            output = with_results(IntermediateTensors({"hidden_states": torch.zeros(2)}), [*received, own])
            received = take_results(output)
            assert list(output.tensors) == ["hidden_states"], "vLLM's runner knows no others"
    plan = workers[-1].run()
    for results in with_silent_stages(received, stages[-1]):
        add_results(plan, results, spec)
    StepCollection(lambda _: None, None).collect(plan)
    return step_delivery(plan).results([[1]] * 2, {"r": 0, "s": 1})


def test_results_of_stages_are_those_of_one_worker() -> None:
    operations = {"r": CAPTURES, "s": CAPTURES[:2]}
    found, wanted = over_stages(operations), over_stages(operations, stages=[WHOLE])
    assert found.failures == {}
    assert found.records == wanted.records
    assert {len(records) for records in found.records.values()} == {2, 3}


@pytest.mark.parametrize("stage", [1, -1])
def test_a_failure_on_any_stage_is_the_requests_alone(stage: int) -> None:
    operations = {"r": CAPTURES, "s": CAPTURES}
    found = over_stages(operations, lambda workers: workers[stage].requests["r"].fail("wrong_width", "there"))
    assert [(name, one.code, one.message) for name, one in found.failures.items()] == [
        ("r", "wrong_width", "there")
    ]
    assert found.records == {"s": over_stages(operations, stages=[WHOLE]).records["s"]}


def test_a_write_beyond_float16_on_an_early_stage_fails_its_request() -> None:
    steer = STEER | {"at": "layers.1.output", "mode": "norm_match"}
    operations = {"r": [steer | {"scale": 0.1}, *CAPTURES], "s": [steer | {"scale": 60000.0}, *CAPTURES]}
    found = over_stages(operations, spec=dataclasses.replace(SPEC, dtype="float16"))
    assert [(name, one.code) for name, one in found.failures.items()] == [("s", "not_finite")]
    assert len(found.records["r"]) == len(CAPTURES)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_stage_that_sends_nothing_fails_requests(silent: int) -> None:
    failures = over_stages({"r": [STEER], "s": CAPTURES}, silent=silent).failures
    assert failures.keys() == {"r", "s"}
    assert "did not run" in failures["r"].message


HOST = torch.device("cpu")


def payloads(num_rows: int, *rows: tuple[int, int]) -> RowPayloads:
    return RowPayloads(
        [TraceSpan(str(first), 0, first, num, 0, complete=True) for first, num in rows], num_rows
    )


@pytest.mark.parametrize("shape", [(6, 3), (1, 6, 3), (6,)])
def test_only_the_requests_rows_travel_and_come_back(shape: tuple[int, ...]) -> None:
    parcels = payloads(6, (1, 2), (4, 1))
    whole = torch.arange(6 * 3 if len(shape) > 1 else 6, dtype=torch.float32).reshape(shape)
    axis = shape.index(6)
    packed, forms = parcels.pack((whole, None))
    assert packed[0].shape[axis] == 3
    there, _ = parcels.unpack(packed, forms, HOST)
    own, others = torch.tensor([1, 2, 4]), torch.tensor([0, 3, 5])
    assert torch.equal(there.index_select(axis, own), whole.index_select(axis, own))
    assert not there.index_select(axis, others).any()
    back = parcels.changed((whole, None), parcels.changes((there, None), (there + 1, None)))[0]
    assert torch.equal(back.index_select(axis, own), whole.index_select(axis, own) + 1)
    assert torch.equal(back.index_select(axis, others), whole.index_select(axis, others))


def test_rows_keep_the_order_of_the_requests_when_a_repeated_step_has_them_in_another() -> None:
    parcels = payloads(3, (2, 1), (0, 2))
    whole = torch.tensor([[0.0], [1.0], [2.0]])
    (rows,), forms = parcels.pack((whole,))
    assert rows.flatten().tolist() == [2, 0, 1]
    (there,) = parcels.unpack((rows,), forms, HOST)
    assert torch.equal(there, whole)
    (after,) = parcels.changed((whole,), [(0, rows * 10)])
    assert torch.equal(after, whole * 10)


class Colour(enum.IntEnum):
    RED = 1


def sent(value: Any) -> Any:
    """Return a value as it arrives on another stage."""
    message = encode(value, reference=RowsPlaceholder.reference)
    return decode(
        message,
        resolve=partial(RemoteValue, place="on pipeline stage 0", refusal=partial(StageError.value, stage=0)),
    )


def test_objects_stay_where_they_are_and_have_names() -> None:
    keeper, thing = RowStore(), object()
    kept = keeper.keep((1, {"a": [thing]}))
    there = sent(kept)
    assert repr(there[1]["a"][0]) == "<object on pipeline stage 0>"
    with pytest.raises(StageError, match="of type object"):
        there[1]["a"][0].weight.sum()
    again = decode(encode(there, reference=RemoteValue.reference), resolve=keeper.resolve)
    assert again[1]["a"][0] is thing
    assert keeper.give_back(kept) == (1, {"a": [thing]})


def test_what_the_other_side_may_not_know_stays() -> None:
    keeper = RowStore()
    assert keeper.give_back(keeper.keep({Colour.RED: 1})) == {Colour.RED: 1}
    there = sent(keeper.keep([Colour.RED, {Colour.RED: 1}, 2]))
    assert there[2] == 2
    assert [type(one) for one in there[:2]] == [RemoteValue] * 2
    assert RowStore.refusal(([1, torch.ones(1)], {"a": there[0]})) is None
    assert RowStore.refusal(({"a": [Colour.RED]},)) == "Colour"
