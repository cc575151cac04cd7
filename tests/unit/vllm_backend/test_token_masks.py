"""Rules about tokens give the same results whether the host or the device knows the tokens."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.plans.request_plan import WhereRule
from nnsight_engine.plans.step.token_masks import TokenMasks, may_match, must_match
from nnsight_engine.plans.where import evaluate
from tests.unit.vllm_backend.decoding import VOCAB, Worker
from tests.unit.vllm_backend.test_runs import OPERATIONS, Schedule

WHERES: list[dict[str, Any]] = [
    {"tokens": [1, 4]},
    {"tokens": [0, 2, 3], "phase": "generated"},
    {"tokens": [3], "range": [2, 20]},
    {"exclude": {"tokens": [2, 5]}},
    {"exclude": {"tokens": [1, 2, 3], "range": [4, 30]}, "phase": "generated"},
]
BY_TOKEN = [one | {"where": where} for one, where in itertools.product(OPERATIONS, WHERES)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_known", [0, 3])
def test_requests_get_the_same_results(seed: int, num_known: int) -> None:
    found = []
    for known in (None, num_known):
        worker = Worker(shares=True)
        worker.num_known = known
        operations = [*BY_TOKEN, *OPERATIONS]
        schedule = Schedule(seed, is_calm=seed % 2 > 0, operations=operations, has_faults=False)
        log = schedule.lives(worker, 120)
        found.append([entry for entry in log if entry[0] != "held"])
    assert found[0] == found[1]
    records = [dict(told)["records"] for _, told in found[0] if told is not None]
    assert sum(bool(one) for one in records) > 20


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


def test_random_rules() -> None:
    rng, masks = random.Random(5), TokenMasks(CPU)
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
