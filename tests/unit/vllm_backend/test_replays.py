"""Full graphs with interventions, for steps without any."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import torch

from nnsight_engine.core.work_context import PLAIN, EngineCounts
from nnsight_engine.plans.step.graph_table import GraphTable
from nnsight_engine.vllm_backend.steps.handler import StepHandler
from tests.unit.plans.test_graph_table import CPU, NUM_ROWS, TAPS, WIDTH, executor, plan_of


def test_a_step_whose_only_request_was_refused_is_replayed_with_an_empty_table() -> None:
    """Its registration failed, so no step was prepared for operations."""
    table = GraphTable(TAPS, len(TAPS), NUM_ROWS, WIDTH, CPU, executor)
    held = list[torch.Tensor]()
    table.fill(plan_of(random.Random(0), held))
    handler: Any = SimpleNamespace(counts=EngineCounts())
    handler.plain_forward = lambda run: StepHandler.plain_forward(handler, run)

    def run() -> torch.Tensor:
        value = torch.ones(NUM_ROWS, WIDTH)
        for tap in TAPS:
            table.run(tap, value, None)
        return value

    output = StepHandler.replay(cast(StepHandler, handler), None, table, run)
    assert torch.equal(output, torch.ones(NUM_ROWS, WIDTH))
    assert handler.counts.steps[PLAIN] == 1
