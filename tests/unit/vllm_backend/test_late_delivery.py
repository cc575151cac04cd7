"""A step's results are the same if they are delivered on another thread while the next step is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nnsight_engine.plans.records import StepResults
from tests.unit.vllm_backend.decoding import Rows, Worker, compiled, ends_of, hidden_of
from tests.unit.vllm_backend.test_runs import OPERATIONS, Told, told

NUM_STEPS = 32
PROMPT_LEN = 5
RAWS: list[dict[str, Any]] = [
    one | {"name": f"n{index}"} if one["op"] in {"capture", "probe", "logit_lens"} else one
    for index, one in enumerate(OPERATIONS)
]
REQUESTS = {f"r{index}": compiled([raw], PROMPT_LEN) for index, raw in enumerate(RAWS)}


def batches() -> list[list[Rows]]:
    """Return the steps of requests that arrive one after the other, their prompts in chunks."""
    position = dict.fromkeys(REQUESTS, 0)
    steps = []
    for number in range(NUM_STEPS):
        batch = []
        for seed, name in enumerate(list(REQUESTS)[: number // 2 + 1]):
            start = position[name]
            num_rows = min(3, PROMPT_LEN - start) if start < PROMPT_LEN else 1
            batch.append(Rows(name, seed, start, num_rows))
            position[name] += num_rows
        steps.append(batch)
    return steps


def found_with(worker: Worker, num_late: int) -> dict[str, Told | None]:
    """Run the steps, each one's results delivered ``num_late`` steps later; return the requests' results."""
    waiting: deque[Callable[[], StepResults | None]] = deque()
    known: set[str] = set()
    with ThreadPoolExecutor(1) as pool:
        for batch in batches():
            names = [rows.request_id for rows in batch if rows.request_id not in known]
            arrived = {name: REQUESTS[name] for name in names}
            known |= arrived.keys()
            for name, request in arrived.items():
                worker.outbox.open(name, request.plan, stops_outside=False)
            worker.begin(arrived, set())
            plan = worker.plan(batch)
            due = pool.submit(waiting.popleft()) if len(waiting) >= num_late > 0 else None
            sampled = worker.run(plan, hidden_of(batch), ends_of(batch))
            for rows, ids in zip(batch, sampled, strict=True):
                if rows.start + rows.num_rows < PROMPT_LEN:
                    ids.clear()
            if due is not None:
                worker.outbox.absorb(due.result())
            waiting.append(worker.delivery(plan, batch, sampled))
            if not num_late:
                worker.outbox.absorb(waiting.popleft()())
        for one in waiting:
            worker.outbox.absorb(one())
    return {name: told(worker.take(name, final=True)) for name in REQUESTS}


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("num_late", [1, 2])
def test_late_results_are_the_same(num_late: int, *, shares: bool) -> None:
    in_time = found_with(Worker(shares=shares), 0)
    late = Worker(shares=shares, is_asynchronous=True)
    assert found_with(late, num_late) == in_time
    for name, request in REQUESTS.items():
        assert bool(dict(in_time[name] or ())["records"]) == any(op.reads for op in request.plan.ops)
