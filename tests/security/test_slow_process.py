"""A sandbox's real process and a model that is played: a step that goes on without it changes nothing of what
its block sees, does and saves.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any, cast

import pytest
import torch

from nnsight_engine.sandbox.forkserver import ForkServer
from nnsight_engine.serialization import decode
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.sandboxed.module_call import ModuleCall
from nnsight_engine.vllm_backend.traces.sandboxed.sandbox_pool import SandboxPool
from nnsight_engine.vllm_backend.traces.trace_dispatcher import TraceDispatcher
from tests.security.played import (
    LAYERS,
    LIMITS,
    NEIGHBOUR,
    PROMPT,
    REFUSED,
    STEPS,
    VOCABULARY,
    WIDTH,
    Places,
    code_lasting,
    entry_of,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the process sandbox is Linux's")


class _Served(Places):
    """Calls the one module that there is: doubles rows, few at once."""

    def begin(self, path: str, args: Any, kwargs: Any) -> ModuleCall:
        assert (path, kwargs) == ("model.lm_head", {})

        def double(rows: torch.Tensor) -> torch.Tensor:
            time.sleep(0.01)
            return 2 * rows

        return ModuleCall(path, double, args, args[0].ndim - 1, 1)


@dataclasses.dataclass
class Played:
    """What came of a request: what it saved, what the model ended each step with, and how many were run."""

    saves: dict[str, Any]
    ended_with: list[list[list[float]]]
    num_run: int
    neighbours: list[float]


def play(server: ForkServer, code: str, wait_s: float) -> Played:
    """Play a model to one request with a block, until it has all its tokens."""
    dispatcher = TraceDispatcher()
    dispatcher.place.tokens = {"model.samples.output": VOCABULARY}
    pool = SandboxPool(dispatcher, dataclasses.replace(LIMITS, sandbox_wait_s=wait_s))
    pool.open(server, cast("Any", _Served()), LIMITS.sandbox_message_bytes)
    pool.begin(set())
    pool.arrive("own", entry_of(code), 1, "tenant")
    played, done, step = Played({}, [], 0, []), 0, 0
    while step < STEPS:
        if played.num_run:
            pool.begin(set())
        num_rows = PROMPT if not step else 1
        shift = NEIGHBOUR if played.num_run % 2 else 0  # where its rows are may be another place each time
        ended_with = _step(dispatcher, pool, done, num_rows, shift)
        is_undone = pool.undone == ["own"]
        assert pool.end()[0] == []
        dispatcher.end()
        played.num_run += 1
        assert played.num_run < 300
        if is_undone:
            pool.wait_for_any(0.05)
            continue
        own, neighbours = ended_with
        played.ended_with.append(own)
        played.neighbours += neighbours
        done, step = done + num_rows, step + 1
    pool.begin({"own"})
    while not pool.has_collected("key", {"0/0": {}}, 1.0):
        pass
    pieces, _ = pool.collect("key")
    (block,) = decode(b"".join(pieces))["blocks"]
    assert block["error"] is None, block["error"]["message"]
    played.saves = block["saves"]
    return played


def _step(
    dispatcher: TraceDispatcher, pool: SandboxPool, done: int, num_rows: int, shift: int, name: str = "own"
) -> tuple[list[Any], list[float]]:
    total = num_rows + NEIGHBOUR
    own = slice(shift, shift + num_rows)
    dispatcher.begin()
    pool.step([TraceSpan(name, int(shift > 0), shift, num_rows, done, complete=True)], total)
    hidden = torch.zeros(total, WIDTH)
    hidden[own] = torch.arange(done, done + num_rows).float()[:, None]
    states = []
    for layer in range(LAYERS):
        hidden = hidden + 1
        made = dispatcher.provide(f"model.model.layers.{layer}.output", (hidden, torch.zeros(total, WIDTH)))
        hidden = made[0] + made[1]
        states.append(hidden[own].tolist())
    pool.after_model(2)
    logits = torch.zeros(2, VOCABULARY)
    row = int(shift > 0)
    logits[row] = hidden[own][-1, 0]
    logits = dispatcher.provide("model.logits.output", logits)
    samples = dispatcher.provide("model.samples.output", torch.tensor([[3], [3]]))
    neighbour = [one for one in range(total) if not own.start <= one < own.stop]
    others = [*hidden[neighbour].flatten().tolist(), *logits[1 - row].tolist(), float(samples[1 - row])]
    return [states, logits[row].tolist(), samples[row].tolist()], others


def test_a_step_that_goes_on_without_a_block_changes_nothing_of_what_it_does(server: ForkServer) -> None:
    patient = play(server, code_lasting(0), wait_s=5.0)
    hurried = play(server, code_lasting(0.06), wait_s=0.005)
    assert patient.num_run == STEPS
    assert hurried.num_run > 4 * STEPS, "every step was waited for, so nothing was shown"
    assert len(patient.saves["seen"]) == STEPS
    assert hurried.saves == patient.saves
    assert hurried.ended_with == patient.ended_with
    assert hurried.neighbours == patient.neighbours
    assert patient.ended_with[0][2] == [4]
    assert patient.ended_with[0][1][5] == 7


def _trace(pool: SandboxPool, dispatcher: TraceDispatcher, code: str, key: str = "key") -> dict[str, Any]:
    """Run a trace until it has ended; return what came of its block."""
    pool.begin(set())
    pool.arrive(key, entry_of(code, key), 1, "tenant")
    step = 0
    while step < STEPS:
        _step(dispatcher, pool, step and step + PROMPT - 1, 1 if step else PROMPT, 0, key)
        is_undone = bool(pool.undone)
        ended, _ = pool.end()
        dispatcher.end()
        if ended:
            break
        if is_undone:  # the machine is busy
            pool.wait_for_any(0.1)
        step += not is_undone
        pool.begin(set())
    pool.begin({key})
    while not pool.has_collected(key, {"0/0": {}}, 1.0):
        pass
    pieces, _ = pool.collect(key)
    found: dict[str, Any] = decode(b"".join(pieces))["blocks"][0]
    return found


def _opened(server: ForkServer, **limits: Any) -> tuple[SandboxPool, TraceDispatcher]:
    dispatcher = TraceDispatcher()
    dispatcher.place.tokens = {"model.samples.output": VOCABULARY}
    pool = SandboxPool(dispatcher, dataclasses.replace(LIMITS, sandbox_wait_s=5.0, **limits))
    pool.open(server, cast("Any", _Served()), LIMITS.sandbox_message_bytes)
    return pool, dispatcher


def _end_parked(pool: SandboxPool) -> bool:
    """End the process that waits for the tenant's next trace; return whether there was one."""
    parked = pool._parked.take("tenant")
    if parked is not None:
        parked.end()
    return parked is not None


_ENDLESS = {
    "loop": "while True: pass",
    "deaf loop": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "loop in C": "h = sum(range(10**12))",
    "large number": "h = 10**10**9 > 1",
    "regular expression": "exec(\"import re; re.match('(a+)+$', 'a' * 64 + 'b')\")",
    "class body": "class A:\n    while True: pass",
    "loop in torch": "a = torch.ones(2000, 2000)\nwhile True: a = a @ a",
    "memory": "keep = []\nwhile True: keep.append(torch.ones(10**7))",
    "memory of Python": "keep = []\nwhile True: keep.append(bytearray(2**24))",
    "recursion": "def f(n): return f(n) + 1\nf(1)",
    "recursion in C": "exec('import sys; sys.setrecursionlimit(10**9)')\ndef f(): f()\nf()",
    "processes": "exec('import os\\nwhile True: os.fork()')",
    "threads": "exec('import threading\\nwhile True: threading.Thread(target=print).start()')",
    "files": "exec('import shutil; shutil.rmtree(\"/\")')",
    "saved": "h = [torch.ones(2**20) for _ in range(40)].save()",
    "exit": "exec('import os; os._exit(0)')",
    "signal": "exec('import signal; signal.raise_signal(9)')",
}
_ERRORS = {
    "TimeBudgetError", "SandboxEndedError", "RuntimeError", "MemoryError", "RecursionError",
    "PermissionError", "EncodeError", "ValueError",
}  # fmt: skip


@pytest.mark.parametrize("name", _ENDLESS)
def test_what_does_not_end_or_asks_for_too_much_ends_with_an_error_and_alone(
    server: ForkServer, name: str
) -> None:
    pool, dispatcher = _opened(server, sandbox_step_s=0.5)
    code = _ENDLESS[name] + "\nfor step in tracer.iter[:3]: model.layers[0].output"
    found = _trace(pool, dispatcher, code)
    assert found["error"] is not None
    assert found["error"]["name"] in _ERRORS, found["error"]
    after = _trace(pool, dispatcher, "h = model.layers[0].output.sum().item()\nh = save(h)", "next")
    assert after["error"] is None
    assert after["saves"] == {"h": 48.0}
    assert _end_parked(pool)


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
    pool, dispatcher = _opened(server)
    assert _trace(pool, dispatcher, code)["error"] is None
    assert _end_parked(pool) == is_reused


def test_what_a_trace_saved_is_neither_counted_nor_returned_for_the_next_one_in_its_process(
    server: ForkServer,
) -> None:
    pool, dispatcher = _opened(server)
    step = "for step in tracer.iter[:3]: model.layers[0].output"
    too_much = _trace(pool, dispatcher, f"number = save(7)\nh = torch.zeros(1).expand(2**33).save()\n{step}")
    assert too_much["error"]["name"] == "TraceBytesError"
    found = _trace(pool, dispatcher, f"number = 7\nseen = [1, 2].save()\n{step}", "next")
    assert found["error"] is None, found["error"]
    assert found["saves"] == {"seen": [1, 2]}
    assert pool.counts["started"] == 2
    assert _end_parked(pool)


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
    said = play(server, code, wait_s=5.0).saves["said"]
    assert len(said) == 3
    assert all("`model.lm_head`" in one and "bytes" in one for one in said), said


def test_a_step_goes_on_without_all_slow_traces_of_a_tenant(server: ForkServer) -> None:
    wait_s, busy_s, count = 0.1, 2.0, 6
    dispatcher = TraceDispatcher()
    pool = SandboxPool(dispatcher, dataclasses.replace(LIMITS, sandbox_wait_s=wait_s))
    pool.open(server, cast("Any", _Served()), LIMITS.sandbox_message_bytes)
    code = "import time\nx = model.layers[1].output\nend = time.perf_counter() + SECONDS\n"
    code += "while time.perf_counter() < end:\n    pass\nmodel.layers[2].output[:] = 9"
    code = code.replace("SECONDS", str(busy_s))
    pool.begin(set())
    names = [f"own-{number}" for number in range(count)]
    for number, name in enumerate(names):
        pool.arrive(name, entry_of(code, name), number, "tenant")
    pool.wait_for_any(1.0)
    while pool.waiting:
        pool.wait_for_any(1.0)

    def step(spans: list[TraceSpan]) -> torch.Tensor:
        pool.begin(set())
        dispatcher.begin()
        pool.step(spans, count)
        hidden = torch.zeros(count, WIDTH)
        for layer in range(LAYERS):
            hidden, _ = dispatcher.provide(
                f"model.model.layers.{layer}.output", (hidden, torch.zeros_like(hidden))
            )
        assert pool.end()[0] == []
        dispatcher.end()
        return hidden

    spans = {name: TraceSpan(name, row, row, 1, 0, complete=True) for row, name in enumerate(names)}
    step(list(spans.values()))
    assert pool.waiting == set(names)
    done: set[str] = set()
    while len(done) < count:
        pool.wait_for_any(0.1)
        ready = [span for name, span in spans.items() if name not in done | pool.waiting]
        if ready:
            hidden = step(ready)
            done |= {one.request_id for one in ready if hidden[one.row].eq(9).all()}
    for name in names:
        pool.drop(name)


def test_a_place_that_cannot_be_made_whole_is_refused_as_for_a_trusted_block(server: ForkServer) -> None:
    pool, dispatcher = _opened(server)
    found = _trace(pool, dispatcher, "model.layers[3].mlp.output.sum()")
    assert found["error"]["name"] == "SpreadModuleError"
    assert REFUSED in found["error"]["message"]
    caught = (
        "try:\n    model.layers[3].mlp.output.sum()\nexcept Exception as error:\n    h = save(str(error))"
    )
    assert REFUSED in _trace(pool, dispatcher, caught, "other")["saves"]["h"]
