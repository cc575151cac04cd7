"""What is asked for in a dtype that cannot hold it is refused, at the door or with the answer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from api_schemas.errors import ApiError
from nnsight_engine.core.dtypes import LARGEST
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.tensor_bytes import DTYPES, tensor_from_bytes
from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.collect.outbox import PendingResults
from nnsight_engine.plans.collect.results import CollectedCapture
from nnsight_engine.plans.records import Payload, StepResults
from nnsight_engine.plans.step.active import ActiveRequest
from nnsight_engine.plans.step.builder import StepBuilder
from nnsight_engine.plans.step.collection import StepCollection, run_delivery, step_delivery
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.ledger import ByteLedger
from nnsight_engine.plans.step.patterns import AttentionForm
from nnsight_engine.plans.step.plan import Span
from nnsight_engine.plans.step.registrar import Registrar
from nnsight_engine.plans.step.steady_run import SteadyRun
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans import compiling

WIDTH, PROMPT = 4, [7, 8, 9]
FLOATS = ("float32", "bfloat16", "float16")
POINTS = ["layers.0.output", "layers.1.output"]


def spec(dtype: str) -> ModelSpec:
    return tiny_spec(num_layers=2, hidden_size=WIDTH, dtype=dtype)


def compiled(served: str, *ops: dict[str, Any], stream: bool = False) -> Any:
    return compiling.compiled(*ops, spec=spec(served), prompt=PROMPT, stream=stream)


def collector_of(
    served: str, values: torch.Tensor, capture: dict[str, Any], *, stream: bool = False
) -> RequestCollector:
    """Run one capture over a prompt whose residual stream is ``values`` at both layers."""
    request = compiled(served, {"op": "capture", "at": POINTS, "name": "c"} | capture, stream=stream)
    dtype, device = DTYPES[served], torch.device("cpu")
    ledger = ByteLedger(max_request_bytes=1 << 20, max_engine_bytes=1 << 20)
    context = StepContext(spec(served), dtype, device, ledger, lambda _: AttentionForm(1.0))
    active = Registrar(context).register("r", request.plan, {})
    builder = StepBuilder(context)
    plan = builder.plan([Span(active, 0, len(PROMPT), 0, np.array(PROMPT, np.int32))])
    for tap in (1, 2):
        plan.run(tap, values.to(dtype), torch.zeros_like(values).to(dtype))
    StepCollection(lambda _: None, None).collect(plan)
    results = step_delivery(plan).results([[1]], {"r": 0})
    pending = PendingResults(request.plan, stops_outside=False)
    pending.absorb(results.records["r"], results.infos["r"], results.failures.get("r"))
    payload = pending.take(final=True)
    assert payload is not None
    collector = RequestCollector(
        request.plan, spec(served), prompt_token_ids=PROMPT, op_names=[op.kind for op in request.plan.ops]
    )
    collector.add(Payload.decode(payload.encode()))
    return collector


CASES = list(itertools.product(FLOATS, FLOATS, ("none", "last", "mean"), (True, False)))


@pytest.mark.parametrize(("served", "captured", "reduce", "stream"), CASES)
def test_a_capture_is_what_the_model_has_or_an_error(
    served: str, captured: str, reduce: str, stream: bool
) -> None:
    values = torch.ones(len(PROMPT), WIDTH)
    values[-1, 1] = LARGEST[served] / 2
    collector = collector_of(served, values, {"dtype": captured, "reduce": reduce}, stream=stream)
    take = (
        (lambda: collector.take_part(1)) if stream and reduce == "none" else lambda: collector.take_final([1])
    )
    shared = 3 if reduce == "mean" else 1
    if LARGEST[captured] < LARGEST[served] / 2 / shared:
        with pytest.raises(InterventionError, match=r"beyond float16.*bfloat16 or float32") as caught:
            take()
        assert caught.value.code == "not_finite"
        assert "layers.0.output" in caught.value.message
        return
    collected = take()
    assert collected is not None
    (result,) = collected.results
    assert isinstance(result, CollectedCapture)
    for tensor in result.points.values():
        assert tensor_from_bytes(tensor.dtype, tensor.shape, tensor.data).isfinite().all()


def test_of_a_reduction_only_what_is_left_counts() -> None:
    values = torch.ones(len(PROMPT), WIDTH)
    values[0] = 1e5
    collector = collector_of("float32", values, {"dtype": "float16", "reduce": "last"})
    (result,) = collector.take_final([1]).results
    assert isinstance(result, CollectedCapture)


def test_what_the_model_itself_has_as_infinity_is_handed_out() -> None:
    values = torch.ones(len(PROMPT), WIDTH)
    values[1, 2], values[2, 0] = float("inf"), float("nan")
    (result,) = collector_of("float32", values, {"dtype": "float16"}).take_final([1]).results
    assert isinstance(result, CollectedCapture)
    tensor = result.points[POINTS[1]]
    got = tensor_from_bytes(tensor.dtype, tensor.shape, tensor.data)
    assert torch.equal(got.isinf(), values.isinf())
    assert torch.equal(got.isnan(), values.isnan())
    # A mean does not tell of which value it is infinite.
    with pytest.raises(InterventionError, match="`reduce` none"):
        collector_of("float32", values, {"dtype": "float16", "reduce": "mean"}).take_final([1])


@pytest.mark.parametrize("served", FLOATS)
@pytest.mark.parametrize(
    ("field", "op"),
    [
        ("scale", {"op": "steer", "at": POINTS, "vector": [1e30] * WIDTH, "scale": 1e30}),
        ("vector", {"op": "steer", "at": POINTS, "vector": [3.4e38] * WIDTH}),
        ("vector", {"op": "ablate", "at": POINTS, "method": "vector", "vector": [-3.4e38] * WIDTH}),
        ("values", {"op": "patch", "at": POINTS, "values": [[3.4e38] * WIDTH], "where": {"positions": [0]}}),
        (
            "scale",
            {"op": "steer", "at": POINTS, "mode": "clamp", "vector": [1.0] * WIDTH, "scale": 3.4e38},
        ),
        ("low", {"op": "steer", "at": POINTS, "mode": "clamp", "vector": [1.0] * WIDTH, "low": -3.4e38}),
        ("high", {"op": "steer", "at": POINTS, "mode": "clamp", "vector": [1.0] * WIDTH, "high": 3.4e38}),
        (
            "offset",
            {"op": "steer", "at": POINTS, "mode": "affine", "vector": [1.0] * WIDTH, "offset": 3.4e38},
        ),
        ("vectors", {"op": "steer", "at": POINTS, "vectors": [{"vector": [1.7e38] * WIDTH}] * 2}),
    ],
)
def test_what_goes_into_the_model_fits_its_dtype(served: str, field: str, op: dict[str, Any]) -> None:
    if served == "float32" and op.get("scale") != 1e30:
        compiled(served, op)
        return
    with pytest.raises(ApiError, match=f"finite in {served}") as caught:
        compiled(served, op)
    assert caught.value.code == "not_finite"
    assert caught.value.param == f"interventions.0.{field}"


UNIT = [1.0, 0.0, 0.0, 0.0]
BEYOND: dict[str, dict[str, Any]] = {
    "norm_match": {"vector": UNIT, "mode": "norm_match", "scale": 2.0},
    "clamp": {"vector": UNIT, "mode": "clamp", "scale": 60000.0},
}
NEVER = {"probe": {"at": "layers.0.output", "weights": UNIT}, "above": 1e9}


class Worker:
    """Requests of one worker on a model in float16, all of whose values are -60000 at every layer."""

    def __init__(self, *, is_asynchronous: bool = False) -> None:
        self.hidden: dict[int, torch.Tensor] = {}
        self.ledger = ByteLedger(max_request_bytes=1 << 20, max_engine_bytes=1 << 20)
        context = StepContext(
            spec("float16"),
            torch.float16,
            torch.device("cpu"),
            self.ledger,
            lambda _: AttentionForm(1.0),
            is_asynchronous=is_asynchronous,
        )
        self._registrar, self.builder = Registrar(context), StepBuilder(context)

    def add(self, request_id: str, *ops: dict[str, Any]) -> ActiveRequest:
        request = compiled("float16", *ops)
        tensors = compiling.tensors_of(request)
        return self._registrar.register(request_id, request.plan, tensors)

    def step(self, spans: list[Span], sampled: list[list[int]]) -> StepResults:
        plan = self.builder.plan(spans)
        num_rows = max(span.row + span.num_rows for span in spans)
        for tap in (1, 2):
            self.hidden[tap] = torch.full((num_rows, WIDTH), -60000.0, dtype=torch.float16)
            plan.run(tap, self.hidden[tap], None)
        StepCollection(lambda _: None, None).collect(plan)
        order = {span.request.request_id: index for index, span in enumerate(spans)}
        return step_delivery(plan).results(sampled, order)


def prompt_of(request: ActiveRequest, index: int) -> Span:
    return Span(request, index * len(PROMPT), len(PROMPT), 0, np.array(PROMPT, np.int32), index=index)


@pytest.mark.parametrize("kind", BEYOND)
def test_what_is_added_in_float16_fails_its_request_alone(kind: str) -> None:
    worker = Worker()
    steer = {"op": "steer", "at": POINTS, **BEYOND[kind]}
    small = steer | {"scale": 0.01}
    capture = {"op": "capture", "at": POINTS, "name": "c"}
    requests = [worker.add("beyond", steer, capture), worker.add("small", small, capture)]
    spans = [prompt_of(request, index) for index, request in enumerate(requests)]
    results = worker.step(spans, [[1], [1]])
    assert list(results.failures) == ["beyond"]
    assert results.failures["beyond"].code == "not_finite"
    assert "beyond float16" in results.failures["beyond"].message
    assert list(results.records) == ["small"]
    for hidden in worker.hidden.values():
        assert hidden.isfinite().all(), "others may share what is computed from it"
        assert (hidden[: len(PROMPT)] == -60000).all()
        assert (hidden[len(PROMPT) :, 0] > -60000).all()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_write_that_a_condition_or_a_rule_leaves_out_does_not_fail(is_closed: bool) -> None:
    worker = Worker()
    steer = {"op": "steer", "at": "layers.1.output", **BEYOND["norm_match"]}
    number = 5 if is_closed else 8
    by_token = steer | {"where": {"tokens": [number], "phase": "generated"}}
    gated = steer | {"when": NEVER if is_closed else NEVER | {"above": -1e9}}
    requests = [worker.add("gated", gated), worker.add("by token", by_token)]
    spans = [prompt_of(request, index) for index, request in enumerate(requests)]
    first = worker.step(spans, [[8], [8]])
    assert list(first.failures) == ([] if is_closed else ["gated"])
    # The host does not know the tokens of the second step.
    ids = torch.tensor([8, 8])
    spans = [
        Span(request, row, 1, len(PROMPT), np.array(PROMPT, np.int32), ids, index=row)
        for row, request in enumerate(requests)
    ]
    results = worker.step(spans, [[8], [8]])
    assert list(results.failures) == ([] if is_closed else ["gated", "by token"])


def test_in_a_run_of_steps_only_the_row_that_overflows_fails_its_request() -> None:
    worker = Worker()
    steer = {"op": "steer", "at": "layers.1.output", **BEYOND["norm_match"]}
    requests = [worker.add(name, steer) for name in ("r", "s")]
    spans = [
        Span(request, row, 1, len(PROMPT), np.array(PROMPT, np.int32), index=row)
        for row, request in enumerate(requests)
    ]
    plan, at = worker.builder.plan(spans), np.full(2, len(PROMPT), np.int32)
    run = SteadyRun(plan, ["r", "s"], at, worker.ledger)
    failed = []
    for number, second in enumerate((1.0, -60000.0, 1.0), start=1):
        assert run.go_on(["r", "s"], at + number)
        plan.run(2, torch.tensor([[1.0] * WIDTH, [second] * WIDTH], dtype=torch.float16), None)
        StepCollection(lambda _: None, None).collect(plan)
        results = run_delivery(run).results([[1], [1]], {"r": 0, "s": 1})
        assert results.run_step is not None, "the others' results go on"
        failed.append(list(results.failures))
    assert failed == [[], ["s"], []]


def test_of_drafts_those_that_are_refused_do_not_fail() -> None:
    for num_tokens, fails in ((1, False), (3, True)):
        worker = Worker(is_asynchronous=True)
        op = {"op": "steer", "at": "layers.1.output", **BEYOND["norm_match"]}
        request = worker.add("r", op | {"where": {"tokens": [8]}})
        ids = torch.tensor([7, 7, 8])
        results = worker.step(
            [Span(request, 0, 3, len(PROMPT), np.array(PROMPT, np.int32), ids, 2)], [[7] * num_tokens]
        )
        assert bool(results.failures) is fails
