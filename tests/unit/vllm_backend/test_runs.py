"""Steps that share a plan give what steps told request by request give, at a cost that no request adds to."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from nnsight_engine.plans.records import Failure, Payload, StepResults
from nnsight_engine.plans.request_plan import CompiledRequest
from nnsight_engine.plans.step.plan import StepPlan
from tests.unit.vllm_backend.decoding import HIDDEN, PlayedStep, Rows, Worker, compiled, ends_of, hidden_of

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


@dataclasses.dataclass
class Living:
    """A request: what it asks for, and how far it has come."""

    seed: int
    prompt_len: int
    request: CompiledRequest | None
    stops_outside: bool
    position: int = 0
    num_known: int = 0


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


class Schedule:
    """A random life of an engine, the same for every worker that is shown it.

    Args:
        seed: Decides everything.
        is_calm: Whether little happens beside decoding, so that runs are long.
        operations: Requests have up to four of them.
        has_faults: Whether the model sometimes misses a point, or has a value of the wrong shape there.
    """

    def __init__(
        self,
        seed: int,
        *,
        is_calm: bool,
        operations: Sequence[dict[str, Any]] = OPERATIONS,
        has_faults: bool = True,
    ) -> None:
        self._operations = operations
        self._has_faults = has_faults
        self._rng = random.Random(seed)
        self._rate = 0.06 if is_calm else 0.25
        self._num_requests = 0

    def lives(self, worker: Worker, num_steps: int) -> list[tuple[str, Told | None]]:
        """Run the worker through it; returns all that it tells of anybody, in order."""
        rng = self._rng
        log: list[tuple[str, Told | None]] = []
        running: dict[str, Living] = {}
        preempted: dict[str, Living] = {}
        finished: set[str] = set()
        for _ in range(num_steps):
            arrived = self._arrivals(worker, running)
            if len(running) > 1 and rng.random() < self._rate:
                name = rng.choice(list(running))
                preempted[name] = running.pop(name)
                preempted[name].position = 0
            elif preempted and rng.random() < 0.5:
                name, life = preempted.popitem()
                running[name] = life
            worker.begin(arrived, finished)
            finished = set()
            batch = [self._rows(name, life) for name, life in running.items()]
            log += self._step(worker, batch, running, finished)
        return log

    def _arrivals(self, worker: Worker, running: dict[str, Living]) -> dict[str, CompiledRequest]:
        rng = self._rng
        if running and rng.random() > self._rate:
            return {}
        name, self._num_requests = f"r{self._num_requests}", self._num_requests + 1
        prompt_len = rng.randint(2, 7)
        raw = [
            one | {"name": f"n{index}"} if one["op"] in {"capture", "probe", "logit_lens"} else one
            for index, one in enumerate(rng.sample(self._operations, rng.randint(0, 4)))
        ]
        request = compiled(raw, prompt_len, stream=rng.random() < 0.3) if raw else None
        life = Living(self._num_requests, prompt_len, request, rng.random() < 0.2, num_known=prompt_len)
        running[name] = life
        if request is None:
            return {}
        worker.outbox.open(name, request.plan, stops_outside=life.stops_outside)
        return {name: request}

    def _rows(self, name: str, life: Living) -> Rows:
        missing = life.num_known - life.position
        # A prompt may come in pieces.
        return Rows(name, life.seed, life.position, min(missing, self._rng.choice([3, 8, 64])))

    def _step(
        self, worker: Worker, batch: list[Rows], running: dict[str, Living], finished: set[str]
    ) -> list[tuple[str, Told | None]]:
        rng = self._rng
        log: list[tuple[str, Told | None]] = []
        plan = worker.plan(batch)
        hidden = hidden_of(batch)
        is_narrow, skips = rng.random() < self._rate / 8, rng.random() < self._rate / 8
        is_narrow, skips = is_narrow and self._has_faults, skips and self._has_faults
        tap = 1 if skips else -1
        if plan is not None and rng.random() < self._rate / 2:
            plan.record_uncompiled()
        if is_narrow and plan is not None:
            # The model hands out something that no kernel can work on.
            plan.run(2, hidden[:, : HIDDEN - 1], None)
        sampled = worker.run(plan, hidden, ends_of(batch), skipped_tap=tap)
        for rows, ids in zip(batch, sampled, strict=True):
            life = running[rows.request_id]
            if rows.start + rows.num_rows < life.num_known:
                ids.clear()
        results = worker.finish(plan, batch, sampled)
        failures = {} if results is None else results.failures
        for rows, ids in zip(batch, sampled, strict=True):
            name, life = rows.request_id, running[rows.request_id]
            life.position = rows.start + rows.num_rows
            life.num_known += len(ids)
            is_done = bool(ids) and (rng.random() < self._rate / 2 or life.num_known > 60)
            if not is_done and name not in failures and (not ids or life.request is None):
                continue
            is_last = is_done or name in failures
            if life.request is not None:
                log.append((name, told(worker.take(name, final=is_last))))
                if is_last:
                    worker.outbox.close(name)
            if is_last:
                finished.add(name)
                del running[name]
        log.append(("held", [("live", sorted(worker.state.num_live().items()))]))
        return log


@pytest.mark.parametrize("seed", range(10))
def test_shared_steps_report_the_same_as_single_steps(seed: int) -> None:
    logs, workers = [], []
    for shares in (True, False):
        worker = Worker(shares=shares, max_request_bytes=1_100, max_bytes=1_500)
        logs.append(Schedule(seed, is_calm=seed % 3 > 0).lives(worker, 120))
        workers.append(worker)
    assert logs[0] == logs[1]
    assert workers[0].num_shared > 0
    assert workers[1].num_shared == 0


def test_such_schedules_meet_failures_limits_and_long_runs() -> None:
    codes, num_shared = set(), 0
    for seed in range(10):
        worker = Worker(shares=True, max_request_bytes=1_100, max_bytes=1_500)
        for _, found in Schedule(seed, is_calm=seed % 3 > 0).lives(worker, 120):
            failure = dict(found or ()).get("failure")
            codes |= {failure.code} if isinstance(failure, Failure) else set()
        num_shared += worker.num_shared
    assert codes == {"intervention_failed", "capture_too_large", "engine_capture_full"}
    assert num_shared > 100


STEER = OPERATIONS[0]
CAPTURE = {"op": "capture", "at": "layers.*.output", "where": {"phase": "generated"}, "name": "rows"}
MEAN = CAPTURE | {"reduce": "mean", "name": "mean"}


class Decoding:
    """Requests that decode together, two positions into their answers."""

    def __init__(self, raws: list[list[dict[str, Any]]], **limits: Any) -> None:
        self.worker = Worker(shares=True, **limits)
        self.names = [f"r{index}" for index in range(len(raws))]
        requests = {name: compiled(raw, 2) for name, raw in zip(self.names, raws, strict=True) if raw}
        for name, request in requests.items():
            self.worker.outbox.open(name, request.plan, stops_outside=False)
        self.start = 2
        self.worker.begin(requests, set())
        self.rows = self._batch(0, 2)
        self.finish(self.forward())
        self.step()

    def _batch(self, start: int, num_rows: int) -> list[Rows]:
        return [Rows(name, index, start, num_rows) for index, name in enumerate(self.names)]

    def forward(self) -> StepPlan | None:
        plan = self.worker.plan(self.rows)
        self.sampled = self.worker.run(plan, hidden_of(self.rows), ends_of(self.rows))
        return plan

    def finish(self, plan: StepPlan | None) -> StepResults | None:
        return self.worker.finish(plan, self.rows, self.sampled)

    def step(self, finished: frozenset[str] = frozenset()) -> StepResults | None:
        self.names = [name for name in self.names if name not in finished]
        self.worker.begin({}, set(finished))
        self.rows, self.start = self._batch(self.start, 1), self.start + 1
        return self.finish(self.forward())


def num_calls(decoding: Decoding) -> int:
    """Return how often Python calls anything for one more step, all but the stand-in itself."""
    decoding.worker.begin({}, set())
    decoding.rows = [dataclasses.replace(rows, start=rows.start + 1) for rows in decoding.rows]
    step = PlayedStep(decoding.rows, shares=True)
    order = {request_id: row for row, request_id in enumerate(step.request_ids)}
    hidden = hidden_of(decoding.rows)
    counted = Counter[str]()

    def count(_frame: object, event: str, _arg: object) -> None:
        counted[event] += 1

    state = decoding.worker.state
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
    assert results is not None
    assert results.run_step is not None
    return counted["call"] + counted["c_call"]


def test_a_step_of_a_run_costs_no_call_for_a_request() -> None:
    raw = [STEER, CAPTURE, MEAN]
    counts = []
    for num_requests in (8, 64):
        decoding = Decoding([raw] * num_requests)
        decoding.step()
        decoding.step()
        counts.append(num_calls(decoding))
    assert counts[0] == counts[1]
    assert counts[0] > 0


def spent_s(payload: Payload | None) -> float:
    assert payload is not None
    assert payload.info is not None
    return payload.info.spent_s


def test_times_are_shared_by_what_each_does() -> None:
    decoding = Decoding([[STEER], [], [STEER, CAPTURE]])
    before = {name: spent_s(decoding.worker.take(name, final=True)) for name in ("r0", "r2")}
    for _ in range(3):
        decoding.worker.begin({}, set())
        decoding.rows, decoding.start = decoding._batch(decoding.start, 1), decoding.start + 1
        plan = decoding.forward()
        assert plan is not None
        plan.spent_s = 8.0
        decoding.finish(plan)
    spent = {
        name: spent_s(decoding.worker.take(name, final=True)) - earlier for name, earlier in before.items()
    }
    # One point against three; what the harvest takes comes on top.
    assert spent["r2"] / spent["r0"] == pytest.approx(3)
    assert 24 <= spent["r0"] + spent["r2"] < 25


def test_a_request_that_ends_within_a_run_has_all_results_and_others_go_on() -> None:
    decoding = Decoding([[CAPTURE, MEAN], [CAPTURE], [STEER]])
    decoding.step()
    decoding.step()
    payload = decoding.worker.take("r0", final=True)
    assert payload is not None
    decoding.worker.outbox.close("r0")
    assert payload.info is not None
    assert payload.info.end_position == decoding.start
    assert [record.positions for record in payload.records] == [[2], [3, 4], [2, 3, 4]]
    results = decoding.step(finished=frozenset({"r0"}))
    assert results is not None
    assert results.run_step is None
    assert list(results.infos) == ["r1", "r2"]
    assert results.infos["r1"].end_position == decoding.start
    results = decoding.step()
    assert results is not None
    assert results.run_step is not None
    rest = decoding.worker.take("r1", final=True)
    assert rest is not None
    assert [position for record in rest.records for position in record.positions] == [2, 3, 4, 5, 6]


def test_an_idle_engine_holds_nothing_of_a_run() -> None:
    decoding = Decoding([[CAPTURE]])
    results = decoding.step()
    assert results is not None
    assert results.run_step is not None
    (part,) = results.run_step.parts[0]
    del results
    before = sys.getrefcount(part)
    assert decoding.worker.take("r0", final=True) is not None
    assert decoding.worker.outbox.close("r0")
    # The list of the step's parts went with the run.
    assert sys.getrefcount(part) < before


def test_a_limit_met_in_the_middle_of_a_run_fails_its_request_alone() -> None:
    row_bytes = 2 * HIDDEN * 4
    decoding = Decoding([[CAPTURE], [STEER]], max_request_bytes=3 * row_bytes)
    held = [decoding.worker.state.num_live()["captured_bytes"]]
    for _ in range(2):
        results = decoding.step()
        assert results is not None
        assert results.run_step is not None
        held.append(decoding.worker.state.num_live()["captured_bytes"])
    assert held == [row_bytes, 2 * row_bytes, 3 * row_bytes]
    results = decoding.step()
    assert results is not None
    assert {name: failure.code for name, failure in results.failures.items()} == {"r0": "capture_too_large"}
    assert f"{3 * row_bytes} bytes, this one asked for {4 * row_bytes}" in results.failures["r0"].message
    decoding.step(finished=frozenset({"r0"}))
    assert decoding.worker.state.num_live() == {
        "requests": 1,
        "vectors": 1,
        "dictionaries": 0,
        "captured_bytes": 0,
    }


def test_reads_that_cannot_be_collected_fail_their_requests_and_no_others() -> None:
    lens = {"op": "logit_lens", "layers": "all", "top_k": 2}
    decoding = Decoding([[lens], [CAPTURE]])
    decoding.step()
    decoding.worker.model.is_broken = True
    results = decoding.step()
    assert results is not None
    assert {name: failure.message for name, failure in results.failures.items()} == {
        "r0": "results could not be collected: no logits today"
    }
    assert results.infos["r1"].end_position == decoding.start
    payload = decoding.worker.take("r1", final=True)
    assert payload is not None
    assert [position for record in payload.records for position in record.positions] == [2, 3, 4]


def test_a_step_without_interventions_ends_a_run() -> None:
    decoding = Decoding([[CAPTURE]])
    decoding.step()
    decoding.worker.begin({}, set())
    decoding.worker.outbox.absorb(None)
    results = decoding.step()
    assert results is not None
    assert results.run_step is None
    assert results.infos["r0"].end_position == decoding.start
