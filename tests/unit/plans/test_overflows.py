"""What is asked for in a dtype that cannot hold it is refused, at the door or with the answer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from api_schemas.errors import ApiError
from api_schemas.interventions import parse_interventions
from nnsight_engine.core.dtypes import LARGEST
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.core.tensor_bytes import DTYPES, tensor_from_bytes
from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.collect.outbox import PendingResults
from nnsight_engine.plans.collect.results import CollectedCapture
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.records import Payload
from nnsight_engine.plans.step.builder import StepBuilder
from nnsight_engine.plans.step.collection import StepCollection, step_delivery
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.ledger import ByteLedger
from nnsight_engine.plans.step.patterns import AttentionForm
from nnsight_engine.plans.step.plan import Span
from nnsight_engine.plans.step.registrar import Registrar
from nnsight_engine.plans.step.writes import NormMatch, Project

WIDTH, PROMPT = 4, [7, 8, 9]
VALUES = ("steer", "ablate", "patch", "capture", "probe")
FLOATS = ("float32", "bfloat16", "float16")
POINTS = ["layers.0.output", "layers.1.output"]


def spec(dtype: str) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=WIDTH,
        vocab_size=100,
        dtype=dtype,
        max_model_len=64,
        max_num_batched_tokens=32,
        leaves=(LeafSpec("output", (WIDTH,), "tap", VALUES), LeafSpec("logits", (100,), "tap", VALUES)),
        max_capture_bytes=1 << 20,
    )


def compiled(served: str, *ops: dict[str, Any], stream: bool = False) -> Any:
    return compile_request(
        parse_interventions(list(ops)),
        spec=spec(served),
        prompt_token_ids=PROMPT,
        max_tokens=4,
        token_of=len,
        stream=stream,
    )


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


@pytest.mark.parametrize("kind", ["norm_match", "clamp"])
def test_what_is_added_in_float16_is_looked_at(kind: str) -> None:
    rows, hidden = torch.tensor([0]), torch.full((1, WIDTH), -60000.0, dtype=torch.float16)
    unit = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    kernel = (
        NormMatch(rows, 2 * unit)
        if kind == "norm_match"
        else Project(rows, unit, torch.tensor([[60000.0]]), torch.ones(1, 1))
    )
    before = hidden.clone()
    with pytest.raises(InterventionError, match="float16"):
        kernel.run(hidden, None)
    assert torch.equal(hidden, before)
