"""Steps whose tokens the host does not know yet: drafts, and rules about tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from nnsight_engine.plans.request_plan import WhereRule
from nnsight_engine.plans.step.token_masks import TokenMasks, may_match, must_match
from nnsight_engine.plans.where import evaluate, takes_drafts
from tests.unit.vllm_backend.decoding import VOCAB, Rows, Worker, compiled

CAPTURE: dict[str, Any] = {"op": "capture", "at": "layers.0.output", "name": "n"}


def test_operations_that_depend_on_positions_take_no_drafts() -> None:
    def takes(**operation: Any) -> bool:
        return takes_drafts(compiled([CAPTURE | operation], 6).plan)

    where: dict[str, Any]
    for where in ({"phase": "generated"}, {"tokens": [1]}, {"range": [2, None]}, {"positions": [1]}):
        assert takes(where=where), where
        assert takes(where={"exclude": where}), where
    assert takes()
    for where in (
        {"range": [0, 9]},
        {"range": [8, None]},
        {"positions": [2, 8]},
        {"exclude": {"range": [7, 9]}},
    ):
        assert not takes(where=where), where
    assert takes(at="samples")
    assert not takes(at="samples", where={"tokens": [1]})


def captured(steps: list[tuple[Rows, list[int]]], prompt_len: int, **limits: int) -> tuple[Any, list[int]]:
    """Run the steps of a request and return its failure, and the positions of its rows."""
    worker, request = Worker(shares=True, **limits), compiled([CAPTURE], prompt_len)
    worker.open("r", request)
    worker.begin({"r": request}, set())
    for rows, ids in steps:
        plan = worker.plan([rows])
        worker.run(plan, [rows])
        worker.finish(plan, [rows], [ids])
        worker.begin({}, set())
    payload = worker.take("r", final=True)
    assert payload is not None
    return payload.failure, [position for record in payload.records for position in record.positions]


def test_rows_of_refused_drafts_do_not_count_towards_a_limit() -> None:
    prompt = (Rows("r", 0, 0, 2), [1])
    alone = [prompt, *((Rows("r", 0, position, 1), [1]) for position in range(2, 8))]
    drafted = [prompt, *((Rows("r", 0, position, 4, 3), [1]) for position in range(2, 8))]
    row_bytes = 16
    limit = 8 * row_bytes
    assert captured(alone, 2) == captured(drafted, 2, max_request_bytes=limit) == (None, [*range(8)])
    failure, _ = captured(drafted, 2, max_request_bytes=limit - 1)
    assert failure.code == "capture_too_large"


def test_a_prompt_that_goes_on_behind_rows_from_the_cache_keeps_its_positions() -> None:
    # It is preempted after eight tokens, and finds sixteen in the cache when it returns.
    steps = [(Rows("r", 0, 0, 8), []), (Rows("r", 0, 16, 6, 2), [1, 2]), (Rows("r", 0, 22, 1), [3])]
    failure, positions = captured(steps, 20)
    assert failure is None
    assert positions == [*range(8), *range(16, 22)]


def test_a_request_with_drafts_that_returns_after_a_preemption_reads_each_position_once() -> None:
    worker, requests = Worker(shares=True), {name: compiled([CAPTURE], 2) for name in "ab"}
    for name, request in requests.items():
        worker.open(name, request)
    worker.begin(requests, set())

    def step(*batch: Rows) -> None:
        plan = worker.plan(batch)
        worker.run(plan, batch)
        worker.finish(plan, batch, [[1] for _ in batch])

    step(Rows("a", 0, 0, 2), Rows("b", 1, 0, 2))
    worker.begin({}, set())
    step(Rows("a", 0, 2, 2, 1), Rows("b", 1, 2, 1))
    for position in (3, 4):  # steps of a run
        worker.begin({}, set())
        step(Rows("a", 0, position, 1), Rows("b", 1, position, 1))
    worker.begin({}, set(), {"a": 6})
    step(Rows("b", 1, 5, 1), Rows("a", 0, 0, 6))
    for name in requests:
        payload = worker.take(name, final=True)
        assert payload is not None
        assert [one for record in payload.records for one in record.positions] == [*range(6)]


def rule(rng: random.Random, depth: int = 0) -> WhereRule:
    start = rng.choice([0, 0, rng.randint(0, 12)])
    return WhereRule(
        phase=rng.choice(["all", "all", "prompt", "generated"]),
        positions=tuple(sorted(rng.sample(range(16), 5))) if rng.random() < 0.3 else None,
        start=start,
        stop=rng.choice([None, start + rng.randint(0, 12)]),
        tokens=tuple(rng.sample(range(VOCAB), rng.randint(1, 3))) if rng.random() < 0.6 else None,
        part=rng.choice([0, 0, 1, 2, 3]),
        exclude=rule(rng, depth + 1) if depth < 3 and rng.random() < 0.6 else None,
    )


def test_random_rules_match_on_the_device_what_they_match_on_the_host() -> None:
    rng, masks = random.Random(5), TokenMasks(torch.device("cpu"))
    positions = np.arange(16)
    for _ in range(500):
        one, prompt_len = rule(rng), rng.randint(0, 16)
        results = []
        for _ in range(4):
            ids = np.array([rng.randrange(VOCAB) for _ in positions])
            parts = np.array([rng.randint(1, 3) for _ in positions], np.int8)
            expected = evaluate(one, positions, ids, prompt_len, parts)
            mask = masks.mask(one, positions, torch.from_numpy(ids), prompt_len, torch.from_numpy(parts))
            assert mask.tolist() == expected.tolist()
            results.append(expected)
        may, must = may_match(one, positions, prompt_len), must_match(one, positions, prompt_len)
        assert not (np.any(results, axis=0) & ~may).any()
        assert not (must & ~np.all(results, axis=0)).any()
