"""A sandbox's real process and a model that is played: a step that goes on without it changes nothing of what
its block sees, does and saves.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from nnsight_engine.sandbox.forkserver import ForkServer
from nnsight_engine.vllm_backend.traces.messages import StepFacts
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from tests.security.played import (
    LAYERS,
    NEIGHBOUR,
    PROMPT,
    REFUSED,
    STEPS,
    WIDTH,
    Worker,
    block_of,
    code_lasting,
    entry_of,
    layer_of_one,
    play,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process sandbox is Linux's")


def test_a_step_that_goes_on_without_a_block_changes_nothing_of_what_it_does(server: ForkServer) -> None:
    wait_for(lambda: server.is_ready)  # a step goes on without a trace that has no process yet
    patient = play(Worker(server), code_lasting(0))
    hurried = play(Worker(server, sandbox_wait_s=0.005), code_lasting(0.06))
    assert not patient.undone
    assert len(hurried.undone) > 3 * STEPS, "every step was waited for, so nothing was shown"
    assert len(patient.saves["seen"]) == STEPS
    assert hurried.saves == patient.saves
    assert hurried.states == patient.states
    assert hurried.neighbours == patient.neighbours
    assert patient.states[0][-1] == [4]
    assert patient.states[0][-2][5] == 7


def traced(worker: Worker, code: str, key: str = "key") -> dict[str, Any]:
    """Run a trace until it has ended; return what came of its block."""
    block = play(worker, code, key).block
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("code", "is_reused"),
    [
        ("h = model.layers[0].output.save()\nmodel.layers[1].output[:] *= 2", True),
        ("import random, numpy\nh = save([random.random(), numpy.random.rand(), torch.rand(1)])", True),
        ("class A(torch.nn.Linear): pass\nh = A(2, 2)(torch.ones(2)).save()", True),
        ("torch.set_default_dtype(torch.float64)", False),
        ("torch.relu = print", False),
        ("torch.Tensor.mine = 1", False),
        ("torch.set_printoptions(precision=1)", False),
        ("torch.set_default_device('meta')", False),
        ("torch.set_autocast_enabled('cpu', True)", False),
        ("with torch.inference_mode(), torch.device('meta'): torch.ones(1)", True),
        ("exec('import numpy; numpy.seterr(all=\"raise\")')", False),
        ("exec('import builtins; builtins.mine = 1')", False),
        ("exec('import warnings; warnings.simplefilter(\"error\")')", False),
    ],
)
def test_a_process_in_which_a_block_has_left_something_is_not_used_again(
    server: ForkServer, code: str, is_reused: bool
) -> None:
    worker = Worker(server)
    assert traced(worker, code)["error"] is None
    assert worker.end_parked() == is_reused


def test_what_a_trace_saved_is_neither_counted_nor_returned_for_the_next_one_in_its_process(
    server: ForkServer,
) -> None:
    worker = Worker(server)
    step = "for step in tracer.iter[:3]: model.layers[0].output"
    too_much = traced(worker, f"number = save(7)\nh = torch.zeros(1).expand(2**33).save()\n{step}")
    assert too_much["error"]["name"] == "TraceBytesError"
    found = traced(worker, f"number = 7\nseen = [1, 2].save()\n{step}", "next")
    assert found["error"] is None, found["error"]
    assert found["saves"] == {"seen": [1, 2]}
    assert worker.sandboxes.counts["started"] == 2
    assert worker.end_parked()


def test_what_a_module_is_called_with_is_looked_at_before_it_is_sent(server: ForkServer) -> None:
    code = """
said = [].save()
for rows in (torch.zeros(2**18, 2), torch.zeros(1, 1).expand(2**40, 2)):
    try:
        model.lm_head(rows)
    except Exception as error:
        said.append(str(error))
try:
    model.lm_head(*[torch.zeros(2**15, 7)] * 9)
except Exception as error:
    said.append(str(error))
for step in tracer.iter[:3]:
    model.layers[0].output
"""
    said = play(Worker(server), code).saves["said"]
    assert len(said) == 3
    assert all("`model.lm_head`" in one and "bytes" in one for one in said), said


def test_a_step_goes_on_without_all_slow_traces_of_a_tenant(server: ForkServer) -> None:
    count = 6
    worker = Worker(server, sandbox_wait_s=0.1)
    code = "import time\nx = model.layers[1].output\nend = time.perf_counter() + 2.0\n"
    code += "while time.perf_counter() < end:\n    pass\nmodel.layers[2].output[:] = 9"
    names = [f"own-{number}" for number in range(count)]
    worker.begin_step(StepFacts([(name, entry_of(code, name).to_plain()) for name in names], (), set(names)))
    worker.wait_for_any(1.0)
    while worker.waiting:
        worker.wait_for_any(1.0)

    def step(spans: list[TraceSpan]) -> torch.Tensor:
        worker.begin_step(StepFacts())
        worker.step(spans, count)
        worker.dispatcher.listen()
        hidden = torch.zeros(count, WIDTH)
        for layer in range(LAYERS):
            hidden = layer_of_one(worker, layer, hidden)
        worker.dispatcher.pause()
        assert worker.end_step() == []
        worker.dispatcher.interleaving = False
        return hidden

    spans = {name: TraceSpan(name, row, row, 1, 0, complete=True) for row, name in enumerate(names)}
    step(list(spans.values()))
    assert worker.waiting == set(names)
    done: set[str] = set()
    while len(done) < count:
        worker.wait_for_any(0.1)
        ready = [span for name, span in spans.items() if name not in done | worker.waiting]
        if ready:
            hidden = step(ready)
            done |= {one.request_id for one in ready if hidden[one.row].ge(9).all()}
    for name in names:
        worker.sandboxes.drop(name)


def test_a_place_that_cannot_be_made_whole_is_refused_as_for_a_trusted_block(server: ForkServer) -> None:
    worker = Worker(server)
    found = traced(worker, "model.layers[3].mlp.output.sum()")
    assert found["error"]["name"] == "SpreadModuleError"
    assert REFUSED in found["error"]["message"]
    caught = (
        "try:\n    model.layers[3].mlp.output.sum()\nexcept Exception as error:\n    h = save(str(error))"
    )
    assert REFUSED in traced(worker, caught, "other")["saves"]["h"]


def test_a_place_that_cannot_be_provided_fails_a_block_that_has_read_another(server: ForkServer) -> None:
    traces = Worker(server)
    code = "first = model.layers[0].output.sum().item()\nmodel.layers[1].output"
    traces.begin_step(StepFacts([("own", entry_of(code).to_plain())], (), {"own"}))
    traces.step([TraceSpan("own", 0, 0, PROMPT, 0, complete=True)], PROMPT + NEIGHBOUR)
    traces.dispatcher.listen()
    layer_of_one(traces, 0, torch.zeros(PROMPT + NEIGHBOUR, WIDTH))
    traces.dispatcher.fail("model.model.layers.1.output", RuntimeError("the ranks' parts do not fit"))
    traces.dispatcher.pause()
    assert traces.end_step() == ["own"]
    block = block_of(traces)
    assert block is not None
    assert block["error"]["message"] == "the ranks' parts do not fit"
