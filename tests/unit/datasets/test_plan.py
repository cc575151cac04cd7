"""Packs, shards and rows are a function of lengths and settings."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnsight_engine.datasets.manifest import (
    PlanSettings,
    PromptsChangedError,
    RowSettings,
    SettingsError,
    ShardRecord,
)
from nnsight_engine.datasets.plan import Planner, Reduction, RowSelection, remaining_shards
from tests.unit.datasets.making import POINTS, encode, prompts

COUNTS = st.lists(st.integers(0, 60), max_size=60)
PLANS = st.builds(
    PlanSettings,
    pack_tokens=st.integers(1, 80),
    pack_prompts=st.integers(1, 5),
    shard_tokens=st.integers(1, 200),
    shard_bytes=st.integers(1, 8000),
)
ROWS = RowSettings(points=POINTS)


@given(COUNTS, PLANS)
def test_packs_are_consecutive_and_fit(counts: list[int], plan: PlanSettings) -> None:
    shards = list(Planner(plan, ROWS).shards(counts))
    packs = [pack for shard in shards for pack in shard]
    assert [count for pack in packs for count in pack] == counts
    for pack in packs:
        assert 1 <= len(pack) <= plan.pack_prompts
        assert sum(pack) <= plan.pack_tokens or len(pack) == 1
    for pack, after in itertools.pairwise(packs):
        is_full = len(pack) == plan.pack_prompts or sum(pack) + after[0] > plan.pack_tokens
        assert is_full or any(shard[-1] is pack for shard in shards)


@given(COUNTS, PLANS)
def test_shards_end_with_the_pack_that_reaches_a_limit(counts: list[int], plan: PlanSettings) -> None:
    shards = list(Planner(plan, ROWS).shards(counts))
    for number, shard in enumerate(shards):
        before, tokens = sum(map(sum, shard[:-1])), sum(map(sum, shard))
        assert before < plan.shard_tokens
        assert before * ROWS.row_bytes < plan.shard_bytes
        is_last = number == len(shards) - 1
        assert is_last or tokens >= plan.shard_tokens or tokens * ROWS.row_bytes >= plan.shard_bytes


@given(COUNTS, PLANS, st.data())
def test_a_resumed_plan_is_the_rest_of_the_first(counts: list[int], plan: PlanSettings, data: Any) -> None:
    whole = list(Planner(plan, ROWS).shards(counts))
    done = data.draw(st.integers(0, len(whole)))
    first = sum(len(pack) for shard in whole[:done] for pack in shard)
    assert list(Planner(plan, ROWS).shards(counts[first:])) == whole[done:]


def test_only_missing_shards_are_tokenized() -> None:
    given, planner = prompts(40), Planner(PlanSettings(shard_tokens=50, pack_tokens=20), ROWS)
    whole = list(remaining_shards(given, planner, completed=lambda _: None, encode=encode))
    records = {
        shard.number: ShardRecord(
            shard.number, shard.first_prompt, shard.num_prompts, 0, shard.digest, [], {}
        )
        for shard in whole
        if shard.number % 3
    }
    encoded = []

    def counted(prompt: Any) -> Any:
        encoded.append(prompt)
        return encode(prompt)

    rest = list(remaining_shards(given, planner, completed=records.get, encode=counted))
    missing = [shard for shard in whole if shard.number not in records]
    assert [shard.number for shard in rest] == [shard.number for shard in missing]
    assert [shard.digest for shard in rest] == [shard.digest for shard in missing]
    assert len(encoded) <= sum(shard.num_prompts + 1 for shard in rest)


def test_changed_prompts_are_refused() -> None:
    given, planner = prompts(40), Planner(PlanSettings(shard_tokens=50), ROWS)
    first = next(remaining_shards(given, planner, completed=lambda _: None, encode=encode))
    record = ShardRecord(0, 0, first.num_prompts, 0, first.digest, [], {})
    changed = remaining_shards(prompts(40, seed=1), planner, completed={0: record}.get, encode=encode)
    with pytest.raises(PromptsChangedError, match="shard 0"):
        next(changed)


TOKENS = np.array([7, 8, 9, 7, 5, 7], np.int32)


@pytest.mark.parametrize(
    ("where", "reduction", "positions"),
    [
        ({}, "all", [0, 1, 2, 3, 4, 5]),
        ({}, "last", [5]),
        ({}, "every:4", [0, 4]),
        ({"positions": [0, -1, -9, 20]}, "all", [0, 5]),
        ({"range": [1, -2]}, "all", [1, 2, 3]),
        ({"range": [-20, None]}, "all", [0, 1, 2, 3, 4, 5]),
        ({"tokens": [7]}, "all", [0, 3, 5]),
        ({"tokens": [7], "exclude": {"positions": [-1]}}, "last", [3]),
        ({"exclude": {"positions": [0]}}, "mean", [1, 2, 3, 4, 5]),
        ({"tokens": [1]}, "last", []),
    ],
)
def test_rows(where: dict[str, Any], reduction: str, positions: list[int]) -> None:
    selection = RowSelection(RowSettings(points=POINTS, where=where, reduction=reduction))
    assert selection.positions(3, TOKENS).tolist() == positions


def test_random_rows_depend_on_seed_and_prompt_alone() -> None:
    tokens = np.zeros(100, np.int32)
    one = RowSelection(RowSettings(points=POINTS, reduction="random:10", seed=1))
    other = RowSelection(RowSettings(points=POINTS, reduction="random:10", seed=2))
    chosen = one.positions(5, tokens).tolist()
    assert chosen == [2, 3, 11, 14, 34, 42, 54, 75, 90, 91]  # on every machine
    assert chosen == sorted(set(chosen)) == one.positions(5, tokens).tolist()
    assert chosen != one.positions(6, tokens).tolist()
    assert chosen != other.positions(5, tokens).tolist()
    counts = np.bincount(np.concatenate([one.positions(n, tokens) for n in range(2000)]), minlength=100)
    assert counts.min() > 140
    assert counts.max() < 260
    assert one.positions(5, tokens[:4]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["some", "every:0", "every:", "random:-1", "last:2", "mean "])
def test_an_unknown_reduction_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="all, last, mean, every:K or random:N"):
        Reduction.parse(text)


@pytest.mark.parametrize(
    "where", [{"phase": "generated"}, {"images": [0]}, {"scope": "content"}, {"tokens": [" a"]}, {"x": 1}]
)
def test_a_where_clause_without_meaning_is_refused(where: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="where"):
        RowSelection(RowSettings(points=POINTS, where=where))
