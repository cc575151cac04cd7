"""What is asked for in a dtype that cannot hold it is refused, at the door or with the answer."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from api_schemas.errors import ApiError
from nnsight_engine.core.dtypes import LARGEST
from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.tensors import DTYPES
from nnsight_engine.plans.collect.results import CollectedCapture
from nnsight_engine.plans.step.delivery import step_delivery, streak_delivery
from nnsight_engine.plans.step.plan import Span, Streak
from tests.e2e.fuzz.nearness import as_tensor
from tests.unit.plans import compiling
from tests.unit.plans.toy_engine import LAYERS, WIDTH, Life, ToyEngine

PROMPT = [7, 8, 9]
FLOATS = ("float32", "bfloat16", "float16")
POINT = f"layers.{LAYERS - 1}.output"
LAST = {"positions": [-1]}
UNIT = [1.0] + [0.0] * (WIDTH - 1)


def toy(served: str) -> ToyEngine:
    return ToyEngine(random.Random(0), DTYPES[served])


def life(engine: ToyEngine, *ops: dict[str, Any], max_tokens: int = 2) -> Life:
    request = compiling.compiled(*ops, spec=engine.spec, prompt=PROMPT, max_tokens=max_tokens)
    return Life([*PROMPT], len(PROMPT), max_tokens, request)


def replaced(value: float, **where: Any) -> dict[str, Any]:
    """Return an operation by which the stream has a value in one place."""
    vector = [1.0, value] + [1.0] * (WIDTH - 2)
    return {"op": "steer", "at": POINT, "mode": "replace", "vector": vector, "where": where}


def captured(engine: ToyEngine, *ops: dict[str, Any]) -> torch.Tensor:
    """Return what the last of a request's operations captures."""
    engine.run({"r": life(engine, *ops)})
    (result,) = engine.collected("r", ops).results
    assert isinstance(result, CollectedCapture)
    return as_tensor(result.points[POINT])


@pytest.mark.parametrize(
    ("served", "dtype", "reduce"), list(itertools.product(FLOATS, FLOATS, ("none", "last", "mean")))
)
def test_a_capture_is_what_the_model_has_or_an_error(served: str, dtype: str, reduce: str) -> None:
    engine = toy(served)
    where = {"phase": "prompt"}
    capture = {"op": "capture", "at": POINT, "dtype": dtype, "reduce": reduce, "where": where}
    large = LARGEST[served] / 2
    ops = replaced(1.0), replaced(large, **LAST), capture
    if LARGEST[dtype] < large / (3 if reduce == "mean" else 1):
        with pytest.raises(InterventionError, match=r"beyond float16.*bfloat16 or float32") as caught:
            captured(engine, *ops)
        assert caught.value.code == "not_finite"
        assert POINT in caught.value.message
    else:
        assert captured(engine, *ops).isfinite().all()


def test_of_a_reduction_only_what_is_left_counts() -> None:
    capture = {"op": "capture", "at": POINT, "dtype": "float16", "reduce": "last"}
    assert captured(toy("float32"), replaced(1e5, positions=[0]), capture).isfinite().all()


def test_what_the_model_itself_has_as_infinity_is_handed_out() -> None:
    capture = {"op": "capture", "at": POINT, "dtype": "float16", "where": LAST}
    twice = [replaced(3e38, **LAST), {"op": "steer", "at": POINT, "vector": [0.0, 3e38] + [0.0] * 6}]
    assert captured(toy("float32"), *twice, capture).isinf().sum() == 1
    # A mean does not tell of which value it is infinite.
    with pytest.raises(InterventionError, match="`reduce` none"):
        captured(toy("float32"), *twice, capture | {"reduce": "mean"})


@pytest.mark.parametrize("served", FLOATS)
@pytest.mark.parametrize(
    ("field", "op"),
    [
        ("scale", {"op": "steer", "vector": [1e30] * WIDTH, "scale": 1e30}),
        ("vector", {"op": "steer", "vector": [3.4e38] * WIDTH}),
        ("vector", {"op": "ablate", "method": "vector", "vector": [-3.4e38] * WIDTH}),
        ("values", {"op": "patch", "values": [[3.4e38] * WIDTH], "where": {"positions": [0]}}),
        ("scale", {"op": "steer", "mode": "clamp", "vector": UNIT, "scale": 3.4e38}),
        ("low", {"op": "steer", "mode": "clamp", "vector": UNIT, "low": -3.4e38}),
        ("high", {"op": "steer", "mode": "clamp", "vector": UNIT, "high": 3.4e38}),
        ("offset", {"op": "steer", "mode": "affine", "vector": UNIT, "offset": 3.4e38}),
        ("vectors", {"op": "steer", "vectors": [{"vector": [1.7e38] * WIDTH}] * 2}),
    ],
)
def test_what_goes_into_the_model_fits_its_dtype(served: str, field: str, op: dict[str, Any]) -> None:
    engine = toy(served)
    if served == "float32" and op.get("scale") != 1e30:
        life(engine, op | {"at": POINT})
        return
    with pytest.raises(ApiError, match=f"finite in {served}") as caught:
        life(engine, op | {"at": POINT})
    assert caught.value.code == "not_finite"
    assert caught.value.param == f"interventions.0.{field}"


BEYOND: dict[str, dict[str, Any]] = {
    "norm_match": {"op": "steer", "at": POINT, "vector": UNIT, "mode": "norm_match", "scale": 2.0},
    "clamp": {"op": "steer", "at": POINT, "vector": UNIT, "mode": "clamp", "scale": 60000.0},
}
"""Changes of -60000 that float16 cannot hold, though it holds what they lead to."""
FAR: dict[str, Any] = {"op": "steer", "at": POINT, "mode": "replace", "vector": [-60000.0] * WIDTH}
NEVER = {"probe": {"at": "layers.0.output", "weights": UNIT}, "above": 1e9}


def failed(engine: ToyEngine) -> list[str]:
    """Return which requests have failed, all for want of range."""
    found = engine.failures
    assert all(one.code == "not_finite" and "beyond float16" in one.message for one in found.values())
    return sorted(found)


@pytest.mark.parametrize("kind", BEYOND)
def test_what_is_added_in_float16_fails_its_request_alone_and_is_not_written(kind: str) -> None:
    engine = toy("float16")
    capture = {"op": "capture", "at": POINT}
    small = [FAR, BEYOND[kind] | {"scale": 0.01}, capture]
    engine.run({"beyond": life(engine, FAR, BEYOND[kind]), "small": life(engine, *small)})
    assert failed(engine) == ["beyond"]
    (result,) = engine.collected("small", small).results
    assert isinstance(result, CollectedCapture)
    assert (as_tensor(result.points[POINT])[:, 0] > -60000).all()
    plan = engine.builder.plan([_decoding(engine, life(engine, FAR, BEYOND[kind]))])
    hidden = torch.zeros(1, WIDTH, dtype=torch.float16)
    plan.run(LAYERS, hidden, None)
    assert (hidden == -60000).all(), "others may share what is computed from it"


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_write_that_a_condition_or_a_rule_leaves_out_does_not_fail(is_closed: bool) -> None:
    steer, where = BEYOND["norm_match"], {"phase": "generated"}
    for seed in range(4):  # the host may know the tokens of the second step, or the device alone
        engine = ToyEngine(random.Random(seed), torch.float16)
        engine.run({"plain": (plain := life(engine, FAR, max_tokens=3))})
        token = plain.answer[0] + is_closed
        by_token = steer | {"where": where | {"tokens": [token]}}
        gated = steer | {"where": where, "when": NEVER | ({} if is_closed else {"above": -1e9})}
        lives = {
            "gated": life(engine, FAR, gated, max_tokens=3),
            "by token": life(engine, FAR, by_token, max_tokens=3),
        }
        engine.run(lives)
        assert failed(engine) == ([] if is_closed else ["by token", "gated"])


def _decoding(engine: ToyEngine, one: Life, row: int = 0, num_drafts: int = 0) -> Span:
    """Return rows of a request behind its prompt."""
    assert one.compiled is not None
    tensors = compiling.tensors_of(one.compiled)
    active = engine.registrar.register(f"r{row}", one.compiled.plan, tensors)
    ids = torch.tensor([7] * num_drafts + [8])
    known = np.array(PROMPT, np.int32)
    return Span(active, row, 1 + num_drafts, len(PROMPT), known, ids, num_drafts, index=row)


def test_in_a_run_of_steps_only_the_row_that_overflows_fails_its_request() -> None:
    engine = toy("float16")
    spans = [_decoding(engine, life(engine, BEYOND["norm_match"]), row) for row in range(2)]
    plan, at = engine.builder.plan(spans), np.full(2, len(PROMPT), np.int32)
    run = Streak(plan, ["r0", "r1"], at, engine.ledger)
    failures = []
    for number, second in enumerate((1.0, -60000.0, 1.0), start=1):
        assert run.advance(["r0", "r1"], at + number)
        plan.run(LAYERS, torch.tensor([[1.0] * WIDTH, [second] * WIDTH], dtype=torch.float16), None)
        engine.collection.collect(plan)
        results = streak_delivery(run).results([[1], [1]], {"r0": 0, "r1": 1})
        assert results.run_step is not None, "the others' results go on"
        failures.append(list(results.failures))
    assert failures == [[], ["r1"], []]


@pytest.mark.parametrize(("num_tokens", "fails"), [(1, False), (3, True)])
def test_of_drafts_those_that_are_refused_do_not_fail(num_tokens: int, fails: bool) -> None:
    engine = toy("float16")
    steer = life(engine, BEYOND["norm_match"] | {"where": {"tokens": [8]}})
    plan = engine.builder.plan([_decoding(engine, steer, num_drafts=2)])
    plan.run(LAYERS, torch.full((3, WIDTH), -60000.0, dtype=torch.float16), None)
    engine.collection.collect(plan)
    assert bool(step_delivery(plan).results([[7] * num_tokens], {"r0": 0}).failures) is fails
