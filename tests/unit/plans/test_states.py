"""Captures of recurrent states: one for each request of a step, that after the request's last position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import LeafSpec
from nnsight_engine.plans.collect.results import CollectedCapture
from nnsight_engine.plans.request_plan import CompiledRequest, PlannedSite
from nnsight_engine.plans.step.plan import Span
from nnsight_engine.plans.where import takes_drafts
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import compiled
from tests.unit.plans.toy_engine import StepEngine

SHAPE = (2, 3, 4)
POINT = "layers.0.mixer.state"
SPEC = tiny_spec(LeafSpec("mixer.state", SHAPE, "eager", ("capture",)), num_layers=1, dtype="float16")
ENDS: dict[str, Any] = {"range": [-1, None]}


def captured(prompt: list[int], **fields: Any) -> CompiledRequest:
    capture = {"op": "capture", "at": POINT, "name": "c", "where": ENDS} | fields
    return compiled(capture, spec=SPEC, prompt=prompt)


class Worker(StepEngine):
    """Plans steps over requests, each with a slot of its own for the state."""

    def __init__(self, requests: dict[str, CompiledRequest]) -> None:
        super().__init__(SPEC)
        self.requests = {name: self.admit(name, one) for name, one in requests.items()}

    def step(self, rows: list[tuple[str, int, int, int]], states: torch.Tensor, slots: list[int]) -> None:
        """Run a step with rows ``(request, index in the step, first position, one past the last)``."""
        spans, row = [], 0
        for name, index, start, stop in rows:
            ids = np.zeros(64, np.int32)
            spans.append(Span(self.requests[name], row, stop - start, start, ids, index=index))
            row += stop - start
        plan = self.builder.plan(spans)
        plan.run(PlannedSite("mixer.state", 0), states, torch.tensor(slots, dtype=torch.int32))
        self.deliver(plan, [[1] for _ in rows], {name: number for number, (name, *_) in enumerate(rows)})


def collected(worker: Worker, name: str, request: CompiledRequest, prompt: list[int]) -> CollectedCapture:
    num_generated = worker.requests[name].end_position - len(prompt) + 1
    (result,) = worker.results(name, worker.collector(request, prompt), [1] * num_generated).results
    assert isinstance(result, CollectedCapture)
    return result


def test_each_request_has_its_own_state_at_its_last_position() -> None:
    prompts = {"a": [5, 6, 7], "b": [8, 9]}
    requests = {name: captured(prompt) for name, prompt in prompts.items()}
    worker = Worker(requests)
    states = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    later = states + 1
    # A request without operations comes first in both steps; the first step ends inside of a's prompt.
    worker.step([("a", 2, 0, 2), ("b", 1, 0, 2)], states, slots=[0, 4, 3])
    worker.step([("a", 1, 2, 3), ("b", 2, 2, 3)], later, slots=[0, 3, 4])
    for name, slot, positions, steps in (("a", 3, [2], [later]), ("b", 4, [1, 2], [states, later])):
        result = collected(worker, name, requests[name], prompts[name])
        assert result.positions == positions
        value = result.points[POINT]
        assert (value.dtype, value.shape) == ("float32", (len(positions), *SHAPE))
        found = torch.frombuffer(bytearray(value.data), dtype=torch.float32)
        assert torch.equal(found, torch.cat([one[slot] for one in steps]))


def test_a_state_that_a_step_has_passed_fails_the_request() -> None:
    worker = Worker({"a": captured([5, 6, 7])})
    worker.step([("a", 0, 0, 5)], torch.zeros(2, 24), slots=[1])
    failure = worker.requests["a"].failure
    assert failure is not None
    assert failure.code == "intervention_failed"
    assert "after 2, 3, 4 were" in failure.message


def test_a_state_beyond_the_dtype_asked_for_is_an_error_though_the_model_has_the_same() -> None:
    request = captured([5, 6], dtype="float16")
    worker = Worker({"a": request})
    states = torch.zeros(2, 24)
    states[1, 7] = 1e6
    worker.step([("a", 0, 0, 2)], states, slots=[1])
    with pytest.raises(InterventionError, match="beyond float16"):
        collected(worker, "a", request, [5, 6])


def test_states_of_generated_positions_take_no_drafts() -> None:
    assert takes_drafts(captured([5, 6], where={"positions": [-1]}).plan)
    assert not takes_drafts(captured([5, 6]).plan)
    assert not takes_drafts(captured([5, 6], where={"phase": "generated"}).plan)
