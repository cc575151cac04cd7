"""Captures of recurrent states: one for each request of a step, that after the request's last position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.core.errors import InterventionError
from nnsight_engine.core.model_spec import LeafSpec
from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.collect.outbox import PendingResults
from nnsight_engine.plans.collect.results import CollectedCapture
from nnsight_engine.plans.drafts import takes_drafts
from nnsight_engine.plans.records import Payload
from nnsight_engine.plans.request_plan import CompiledRequest
from nnsight_engine.plans.sites import PlannedSite
from nnsight_engine.plans.step.builder import StepBuilder
from nnsight_engine.plans.step.collection import StepCollection, step_delivery
from nnsight_engine.plans.step.context import StepContext
from nnsight_engine.plans.step.ledger import ByteLedger
from nnsight_engine.plans.step.patterns import AttentionForm
from nnsight_engine.plans.step.plan import Span
from nnsight_engine.plans.step.registrar import Registrar
from tests.fakes.model_specs import tiny_spec
from tests.unit.plans.compiling import compiled

SHAPE = (2, 3, 4)
POINT = "layers.0.mixer.state"
SPEC = tiny_spec(LeafSpec("mixer.state", SHAPE, "eager", ("capture",)), num_layers=1, dtype="float16")
ENDS: dict[str, Any] = {"range": [-1, None]}


def captured(prompt: list[int], **fields: Any) -> CompiledRequest:
    capture = {"op": "capture", "at": POINT, "name": "c", "where": ENDS} | fields
    return compiled(capture, spec=SPEC, prompt=prompt)


class Worker:
    """Plans steps over requests, each with a slot of its own for the state."""

    def __init__(self, requests: dict[str, CompiledRequest]) -> None:
        ledger = ByteLedger(max_request_bytes=1 << 20, max_engine_bytes=1 << 20)
        context = StepContext(SPEC, torch.float16, torch.device("cpu"), ledger, lambda _: AttentionForm(1.0))
        registrar = Registrar(context)
        self.requests = {name: registrar.register(name, one.plan, {}) for name, one in requests.items()}
        self.builder = StepBuilder(context)
        self.pending = {name: PendingResults(one.plan, stops_outside=False) for name, one in requests.items()}

    def step(self, rows: list[tuple[str, int, int, int]], states: torch.Tensor, slots: list[int]) -> None:
        """Run a step with rows ``(request, index in the step, first position, one past the last)``."""
        spans, row = [], 0
        for name, index, start, stop in rows:
            ids = np.zeros(64, np.int32)
            spans.append(Span(self.requests[name], row, stop - start, start, ids, index=index))
            row += stop - start
        plan = self.builder.plan(spans)
        plan.run(PlannedSite("mixer.state", 0), states, torch.tensor(slots, dtype=torch.int32))
        StepCollection(lambda _: None, None).collect(plan)
        for span in spans:
            span.request.advance(span.start, span.stop)
        names = [name for name, *_ in rows]
        results = step_delivery(plan).results(
            [[1] for _ in names], {name: number for number, name in enumerate(names)}
        )
        for name in names:
            self.pending[name].absorb(
                results.records.get(name, []), results.infos[name], results.failures.get(name)
            )


def collected(worker: Worker, name: str, request: CompiledRequest, prompt: list[int]) -> CollectedCapture:
    payload = worker.pending[name].take(final=True)
    assert payload is not None
    collector = RequestCollector(request.plan, SPEC, prompt_token_ids=prompt, op_names=["capture"])
    collector.add(Payload.decode(payload.encode()))
    num_generated = worker.requests[name].end_position - len(prompt) + 1
    (result,) = collector.take_final([1] * num_generated).results
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
