"""A table for graphs does what the step's own does, in memory that stays."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.plans.step.graph_table import GraphTable, instructions_per_row
from nnsight_engine.plans.step.instructions import DTYPE_CODES, Code, Execute, Instructions, Word
from nnsight_engine.plans.step.plan import Span, StepPlan
from nnsight_engine.plans.step.table import Block, TableBuilder
from tests.unit.plans import toy_engine
from tests.unit.plans.compiling import compiled
from tests.unit.plans.test_groups import member

CPU = torch.device("cpu")


def executor(*table: torch.Tensor) -> Execute:
    """Return the CPU's, whose module is slow to import."""
    from nnsight_engine.plans.step import cpu_executor  # noqa: PLC0415

    return cpu_executor.executor(*table)


TAPS = (0, 2, 5)
NUM_ROWS, WIDTH = 6, 3


def plan_of(draw: random.Random, held: list[torch.Tensor], keys: tuple[Any, ...] = TAPS) -> StepPlan:
    """Return a plan that adds and reads at random rows of random taps."""
    table = TableBuilder()
    for key in draw.sample(keys, draw.randint(1, len(keys))):
        for order in range(draw.randint(1, 3)):
            rows = np.asarray(sorted(draw.sample(range(NUM_ROWS), draw.randint(2, NUM_ROWS))))
            vector = torch.full((WIDTH,), float(draw.randint(1, 9)))
            held.append(vector)
            own = Instructions.blank(1, draw.choice((Code.ADD, Code.SET)))
            own.words[:, Word.OPERAND], own.words[:, Word.DTYPE] = (
                vector.data_ptr(),
                DTYPE_CODES[vector.dtype],
            )
            table.add(Block(member(1), [key], [order], rows, own, {}))
    plan = StepPlan({})
    for key, segments in table.segments({}, executor, CPU, lambda _key: WIDTH).items():
        plan.groups[key] = [segment for _, segment in segments]
    return plan


@pytest.mark.parametrize("seed", range(30))
def test_it_does_what_plans_do_one_after_the_other(seed: int) -> None:
    draw, held = random.Random(seed), list[torch.Tensor]()
    table = GraphTable(TAPS, len(TAPS), NUM_ROWS, WIDTH, CPU, executor)
    memory = [one.data_ptr() for one in table.memory]
    for _ in range(4):
        plan = None if draw.random() < 0.2 else plan_of(draw, held)
        for _ in range(draw.randint(1, 2)):
            table.fill(plan)
            for tap in TAPS:
                value, expected = torch.ones(2, NUM_ROWS, WIDTH)
                table.run(tap, value, None)
                if plan is not None:
                    plan.run(tap, expected, None)
                assert torch.equal(value, expected)
    assert [one.data_ptr() for one in table.memory] == memory


def refused(table: GraphTable, plan: StepPlan) -> None:
    """See that a plan is refused, and that the table then does nothing."""
    request = member(1).request
    plan.spans["0"] = Span(request, 0, 1, 0, np.empty(0, np.int32))
    table.serve(plan)
    assert request.failure is not None
    assert "defect of the server" in request.failure.message
    value = torch.ones(NUM_ROWS, WIDTH)
    for tap in filter(table.has, TAPS):
        table.run(tap, value, None)
    assert torch.equal(value, torch.ones(NUM_ROWS, WIDTH))


def test_a_plan_with_other_work_is_refused_and_nothing_runs() -> None:
    draw, held = random.Random(0), list[torch.Tensor]()
    table = GraphTable(TAPS, len(TAPS), NUM_ROWS, WIDTH, CPU, executor)
    table.fill(plan_of(draw, held))
    refused(table, plan_of(draw, held, keys=(1,)))
    plan = plan_of(draw, held)
    groups = next(iter(plan.groups.values()))
    groups.append(groups[0])
    table.fill(plan_of(draw, held))
    refused(table, plan)


def test_a_plan_that_is_too_large_is_refused() -> None:
    draw, held = random.Random(0), list[torch.Tensor]()
    table = GraphTable(TAPS[:1], 1, 1, WIDTH, CPU, executor)
    for _ in range(5):
        refused(table, plan_of(draw, held, keys=TAPS[:1]))


VECTOR = [1.0] * toy_engine.WIDTH
STEER = {"op": "steer", "at": "layers.1.output", "vector": VECTOR}
OF_STREAM = {"probe": {"at": "layers.1.output", "weights": VECTOR}, "above": 0.0}
INSIDE = {"probe": {"at": "layers.1.mlp.output", "weights": VECTOR}, "above": 0.0}
HISTORY = {"over": "window", "of": 3, "reduce": "mean"}
PROMPT = {"where": {"phase": "prompt"}}


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        pytest.param(STEER, 1, id="a write"),
        pytest.param({"op": "capture", "at": "layers.*.output"}, toy_engine.LAYERS, id="reads"),
        pytest.param({"op": "capture", "at": "logits"}, 1, id="behind the model"),
        pytest.param({"op": "capture", "at": "layers.1.mlp.output"}, None, id="inside a layer"),
        pytest.param({"op": "capture", "at": "layers.1.mlp.output"} | PROMPT, 0, id="of the prompt only"),
        pytest.param(STEER | {"when": OF_STREAM}, 4, id="dot, test, join, write"),
        pytest.param(STEER | {"when": OF_STREAM | HISTORY}, 4, id="a history"),
        pytest.param(STEER | {"when": INSIDE}, None, id="a condition inside a layer"),
        pytest.param(STEER | {"when": OF_STREAM | HISTORY} | PROMPT, 4, id="its test goes on"),
        pytest.param(STEER | {"when": INSIDE | HISTORY} | PROMPT, None, id="its test goes on inside"),
        pytest.param(STEER | {"when": INSIDE} | PROMPT, 0, id="its test ends with the prompt"),
    ],
)
def test_a_request_fits_by_what_it_does_behind_the_prompt(
    operation: dict[str, Any], expected: int | None
) -> None:
    engine = toy_engine.ToyEngine(random.Random(0))
    active = engine.admit("r", compiled(operation, spec=engine.spec, prompt=[1, 2, 3]))
    taps = range(toy_engine.LAYERS + 1)
    assert instructions_per_row(active, taps, has_drafts=False) == expected
    has_history = "over" in operation.get("when", {})
    assert instructions_per_row(active, taps, has_drafts=True) == (None if has_history else expected)
    if operation["op"] == "steer":
        assert instructions_per_row(active, {0, 3}, has_drafts=False) in {None, 0}
