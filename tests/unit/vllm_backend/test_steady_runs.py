"""Steps that share a plan give what steps told request by request give, at a cost that no request adds to."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
from collections import Counter
from types import FrameType
from typing import Any

import msgspec
import pytest

from nnsight_engine.core.work_context import EAGER
from nnsight_engine.plans.records import Failure, Payload, StepResults
from nnsight_engine.plans.request_plan import CompiledRequest
from nnsight_engine.plans.step.plan import StepPlan
from tests.unit.vllm_backend.decoding import HIDDEN, Rows, Worker, compiled, hidden_of

OPERATIONS: list[dict[str, Any]] = [
    {"op": "steer", "at": "layers.0.output", "vector": [1.0, 0, 0, 2]},
    {"op": "steer", "at": "layers.*.output", "vector": [0, 1.0, 0, 0], "where": {"phase": "generated"}},
    {"op": "steer", "at": "logits", "vector": [0, 0, 3.0, 0, 0, 1]},
    {"op": "ablate", "at": "layers.1.output", "units": [1], "where": {"range": [0, 9]}},
    {"op": "capture", "at": "layers.*.output"},
    {"op": "capture", "at": ["layers.0.output", "logits"], "where": {"phase": "generated"}},
    {"op": "capture", "at": "layers.1.output", "reduce": "mean"},
    {"op": "capture", "at": ["layers.1.output", "norm.output"], "reduce": "last"},
    {"op": "capture", "at": "samples"},
    {"op": "capture", "at": "samples", "reduce": "last"},
    {"op": "probe", "at": "layers.*.output", "weights": [1.0, -1, 0, 1], "bias": 0.5},
    {"op": "logit_lens", "layers": "all", "top_k": 2, "targets": [3]},
]
NAMED = {"capture", "probe", "logit_lens"}
"""Operations that read."""

Told = list[tuple[str, object]]


def told(payload: Payload | None) -> Told | None:
    """Return what a payload says, however its records are divided; times differ from run to run."""
    if payload is None:
        return None
    found: dict[int, tuple[list[int], list[bytes]]] = {}
    for record in payload.records:
        positions, parts = found.setdefault(record.op, ([], [b""] * len(record.parts)))
        positions.extend(record.positions)
        parts[:] = [part + new for part, new in zip(parts, record.parts, strict=True)]
    known = None if payload.info is None else msgspec.structs.replace(payload.info, spent_s=0.0)
    return [("records", sorted(found.items())), ("info", known), ("failure", payload.failure)]


@dataclasses.dataclass
class Living:
    """A request: what it asks for, and how far it has come."""

    seed: int
    request: CompiledRequest | None
    num_known: int
    position: int = 0


class Schedule:
    """A random life of an engine, the same for every worker that is shown it.

    The model sometimes misses a point, or has a value of the wrong shape there.

    Args:
        seed: Decides everything; little happens beside decoding in most lives, so that runs are long.
        worker: The worker that is shown it.
    """

    def __init__(self, seed: int, worker: Worker) -> None:
        self._rng, self._worker = random.Random(seed), worker
        self._rate = 0.06 if seed % 3 else 0.25
        self._num_requests = 0
        self._running: dict[str, Living] = {}
        self._log: list[tuple[str, Told | None]] = []

    def lived(self, num_steps: int = 120) -> list[tuple[str, Told | None]]:
        """Run the worker through it; returns all that it tells of anybody, in order."""
        rng, running = self._rng, self._running
        preempted: dict[str, Living] = {}
        finished: set[str] = set()
        for _ in range(num_steps):
            arrived = self._arrivals()
            if len(running) > 1 and rng.random() < self._rate:
                name = rng.choice(list(running))
                preempted[name] = running.pop(name)
                preempted[name].position = 0
            elif preempted and rng.random() < 0.5:
                name, life = preempted.popitem()
                running[name] = life
            self._worker.begin(arrived, finished)
            finished = self._step()
        return self._log

    def _arrivals(self) -> dict[str, CompiledRequest]:
        rng = self._rng
        if self._running and rng.random() > self._rate:
            return {}
        name, self._num_requests = f"r{self._num_requests}", self._num_requests + 1
        prompt_len = rng.randint(2, 7)
        raw = [
            one | {"name": f"n{index}"} if one["op"] in NAMED else one
            for index, one in enumerate(rng.sample(OPERATIONS, rng.randint(0, 4)))
        ]
        request = compiled(raw, prompt_len, stream=rng.random() < 0.3) if raw else None
        self._running[name] = Living(self._num_requests, request, prompt_len)
        if request is None:
            return {}
        self._worker.open(name, request, stops_outside=rng.random() < 0.2)
        return {name: request}

    def _step(self) -> set[str]:
        """Return the requests that ended."""
        rng, worker, finished = self._rng, self._worker, set[str]()
        batch = [
            # A prompt may come in pieces.
            Rows(name, life.seed, life.position, min(life.num_known - life.position, rng.choice([3, 8, 64])))
            for name, life in self._running.items()
        ]
        plan = worker.plan(batch)
        is_narrow, skips = rng.random() < self._rate / 8, rng.random() < self._rate / 8
        if plan is not None and rng.random() < self._rate / 2:
            plan.note_tier(EAGER)
        if is_narrow and plan is not None:
            # The model hands out something that no kernel can work on.
            plan.run(2, hidden_of(batch)[:, : HIDDEN - 1], None)
        sampled = worker.run(plan, batch, skipped_tap=1 if skips else -1)
        for rows, ids in zip(batch, sampled, strict=True):
            if rows.start + rows.num_rows < self._running[rows.request_id].num_known:
                ids.clear()
        results = worker.finish(plan, batch, sampled)
        failures = {} if results is None else results.failures
        for rows, ids in zip(batch, sampled, strict=True):
            name, life = rows.request_id, self._running[rows.request_id]
            life.position = rows.start + rows.num_rows
            life.num_known += len(ids)
            is_done = bool(ids) and (rng.random() < self._rate / 2 or life.num_known > 60)
            is_last = is_done or name in failures
            if life.request is not None and (ids or is_last):
                self._log.append((name, told(worker.take(name, final=is_last))))
            if is_last:
                if life.request is not None:
                    worker.outbox.close(name)
                finished.add(name)
                del self._running[name]
        self._log.append(("held", [("live", sorted(worker.state.num_live().items()))]))
        return finished


def test_shared_steps_report_the_same_as_single_steps() -> None:
    codes, num_shared = set(), 0
    for seed in range(10):
        single, shared = (
            Worker(shares=shares, max_request_bytes=1_100, max_bytes=1_500) for shares in (False, True)
        )
        log = Schedule(seed, shared).lived()
        assert log == Schedule(seed, single).lived()
        assert single.num_shared == 0
        num_shared += shared.num_shared
        failures = [dict(found or ()).get("failure") for _, found in log]
        codes |= {failure.code for failure in failures if isinstance(failure, Failure)}
    assert codes == {"intervention_failed", "capture_too_large", "engine_capture_full"}
    assert num_shared > 100


STEER = OPERATIONS[0]
CAPTURE = {"op": "capture", "at": "layers.*.output", "where": {"phase": "generated"}, "name": "rows"}
MEAN = CAPTURE | {"reduce": "mean", "name": "mean"}


class Decoding:
    """Requests that decode together, one position into their answers."""

    def __init__(self, raws: list[list[dict[str, Any]]]) -> None:
        self.worker = Worker(shares=True)
        requests = {f"r{index}": compiled(raw, 2) for index, raw in enumerate(raws) if raw}
        for name, request in requests.items():
            self.worker.open(name, request)
        self.rows = [Rows(f"r{index}", index, 0, 2) for index in range(len(raws))]
        self.worker.begin(requests, set())
        self.finish(self.forward())
        self.step()

    def forward(self) -> StepPlan | None:
        plan = self.worker.plan(self.rows)
        self.sampled = self.worker.run(plan, self.rows)
        return plan

    def finish(self, plan: StepPlan | None) -> StepResults | None:
        return self.worker.finish(plan, self.rows, self.sampled)

    def begin(self) -> None:
        """Begin the next step."""
        self.worker.begin({}, set())
        self.rows = [
            dataclasses.replace(rows, start=rows.start + rows.num_rows, num_rows=1) for rows in self.rows
        ]

    def step(self) -> StepResults:
        self.begin()
        results = self.finish(self.forward())
        assert results is not None
        return results


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_asked_for_is_read(operation: dict[str, Any]) -> None:
    decoding = Decoding([[operation | ({"name": "n"} if operation["op"] in NAMED else {})]])
    decoding.step()
    payload = decoding.worker.take("r0", final=True)
    assert payload is not None
    assert payload.failure is None
    assert bool(payload.records) == (operation["op"] in NAMED)


def calls(decoding: Decoding) -> Counter[str]:
    """Return how often Python calls each function for one more step, all but those of tests.

    Tests of engines in the same process watch all reads, until its end.
    """
    decoding.begin()
    state, step, hidden = decoding.worker.state, decoding.worker.step(decoding.rows), hidden_of(decoding.rows)
    order = {request_id: row for row, request_id in enumerate(step.request_ids)}
    counted = Counter[str]()

    def count(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_globals.get("__name__", "").startswith("tests."):
            return
        if event == "call":
            counted[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            counted[f"{frame.f_code.co_qualname}: {getattr(arg, '__qualname__', arg)}"] += 1

    gc.collect()
    gc.disable()  # its callbacks are calls of their own
    sys.setprofile(count)
    try:
        plan = state.plan(step)
        assert plan is not None
        for tap in (1, 2):
            plan.run(tap, hidden, None)
        state.collect(plan)
        delivery = state.leave(plan)
        assert delivery is not None
        results = delivery.results(decoding.sampled, order)
        decoding.worker.outbox.absorb(results)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert results is not None
    assert results.run_step is not None
    return counted


def test_a_step_of_a_run_costs_no_call_for_a_request() -> None:
    counts = []
    for num_requests in (8, 64):
        decoding = Decoding([[STEER, CAPTURE, MEAN]] * num_requests)
        decoding.step()
        decoding.step()
        counts.append(calls(decoding))
    assert counts[0] == counts[1]
    assert counts[0].total() > 0


def test_times_are_shared_by_what_each_does() -> None:
    decoding = Decoding([[STEER], [], [STEER, CAPTURE]])

    def spent_s(name: str) -> float:
        payload = decoding.worker.take(name, final=True)
        assert payload is not None
        assert payload.info is not None
        return payload.info.spent_s

    before = {name: spent_s(name) for name in ("r0", "r2")}
    for _ in range(3):
        decoding.begin()
        plan = decoding.forward()
        assert plan is not None
        plan.spent_s = 8.0
        decoding.finish(plan)
    spent = {name: spent_s(name) - earlier for name, earlier in before.items()}
    # One point against three; what the harvest takes comes on top.
    assert spent["r2"] / spent["r0"] == pytest.approx(3)
    assert 24 <= spent["r0"] + spent["r2"] < 25


def test_an_idle_engine_holds_nothing_of_a_run() -> None:
    decoding = Decoding([[CAPTURE]])
    results = decoding.step()
    assert results.run_step is not None
    (part,) = results.run_step.parts[0]
    del results
    before = sys.getrefcount(part)
    assert decoding.worker.take("r0", final=True) is not None
    assert decoding.worker.outbox.close("r0")
    # The list of the step's parts went with the run.
    assert sys.getrefcount(part) < before


def test_reads_that_cannot_be_collected_fail_their_requests_and_no_others() -> None:
    lens = {"op": "logit_lens", "layers": "all", "top_k": 2}
    decoding = Decoding([[lens], [CAPTURE]])
    decoding.step()
    decoding.worker.model.is_broken = True
    results = decoding.step()
    assert {name: failure.message for name, failure in results.failures.items()} == {
        "r0": "results could not be collected: no logits today"
    }
    payload = decoding.worker.take("r1", final=True)
    assert payload is not None
    assert [position for record in payload.records for position in record.positions] == [2, 3, 4]
