"""The prefix cache never serves steered keys and values, and never swallows rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.dictionaries import random_dictionary
from nnsight_engine.plans.collect.results import CollectedFeatures
from tests.e2e.harness import Engine, random_vector
from tests.narrow_model import WIDTH

pytestmark = pytest.mark.e2e

LONG = "The history of the city begins with a small settlement by the river. " * 14
STEER = {
    "op": "steer",
    "at": "layers.5.output",
    "vector": random_vector(0),
    "scale": 4,
}


@pytest.fixture(scope="module")
def engine(narrow: Path) -> Iterator[Engine]:
    with Engine(narrow, dtype="float32", block_size=32, max_num_batched_tokens=1024) as engine:
        yield engine


@pytest.fixture
def fresh(engine: Engine) -> Engine:
    assert engine.llm.reset_prefix_cache()
    return engine


def test_plain_after_steered_is_not_poisoned_and_still_caches(fresh: Engine) -> None:
    expected = fresh.ask(LONG, max_tokens=8).token_ids
    assert fresh.llm.reset_prefix_cache()
    steered = fresh.ask(LONG, [STEER], max_tokens=8)
    assert steered.token_ids != expected
    first = fresh.ask(LONG, max_tokens=8)
    assert first.token_ids == expected
    assert first.num_cached_tokens == 0
    second = fresh.ask(LONG, max_tokens=8)
    assert second.token_ids == expected
    assert second.num_cached_tokens > 64


def test_steered_after_plain_is_steered(fresh: Engine) -> None:
    expected = fresh.ask(LONG, [STEER], max_tokens=8).token_ids
    assert fresh.llm.reset_prefix_cache()
    fresh.ask(LONG, max_tokens=8)
    steered = fresh.ask(LONG, [STEER], max_tokens=8)
    assert steered.token_ids == expected
    assert steered.num_cached_tokens == 0


def test_the_same_writes_share_their_own_cache(fresh: Engine) -> None:
    first = fresh.ask(LONG, [STEER], max_tokens=8)
    second = fresh.ask(LONG, [STEER], max_tokens=8)
    assert second.num_cached_tokens > 64
    assert second.token_ids == first.token_ids
    assert second.collected is not None
    assert first.collected is not None
    assert second.collected.cached_tokens == second.num_cached_tokens
    assert second.collected.applied == first.collected.applied
    other = fresh.ask(LONG, [{**STEER, "scale": 5}], max_tokens=8)
    assert other.num_cached_tokens == 0


def test_a_longer_prompt_does_not_take_generated_writes_for_its_own(fresh: Engine) -> None:
    ids = fresh.token_ids(LONG)
    steer = {**STEER, "where": {"phase": "generated"}}
    first = fresh.ask(ids, [steer], max_tokens=40)
    longer = [*ids, *first.token_ids]
    continued = fresh.ask(longer, [steer], max_tokens=4)
    assert fresh.llm.reset_prefix_cache()
    assert continued.token_ids == fresh.ask(longer, [steer], max_tokens=4).token_ids


def test_a_capture_after_a_cache_hit_returns_every_row(fresh: Engine) -> None:
    capture = [{"op": "capture", "at": "layers.29.output", "name": "c", "where": {"phase": "prompt"}}]
    cold = fresh.ask(LONG, capture, max_tokens=1)
    fresh.ask(LONG, max_tokens=1)
    assert fresh.ask(LONG, max_tokens=1).num_cached_tokens > 64
    warm = fresh.ask(LONG, capture, max_tokens=1)
    num_rows = len(fresh.token_ids(LONG))
    assert warm.tensor("c", "layers.29.output").shape == (num_rows, WIDTH)
    assert torch.equal(warm.tensor("c", "layers.29.output"), cold.tensor("c", "layers.29.output"))


def test_reads_of_generated_positions_may_use_the_cache(fresh: Engine) -> None:
    fresh.ask(LONG, max_tokens=1)
    lens = {"op": "logit_lens", "layers": [29], "top_k": 1, "name": "l", "where": {"phase": "generated"}}
    reply = fresh.ask(LONG, [lens], max_tokens=4)
    assert reply.num_cached_tokens > 64
    prompt_len = len(fresh.token_ids(LONG))
    assert reply.result("l").positions == [prompt_len, prompt_len + 1, prompt_len + 2]


def test_changes_of_features_have_caches_of_their_own(fresh: Engine) -> None:
    dictionary = random_dictionary(5, WIDTH)
    change = {
        "op": "feature",
        "dictionary": dictionary,
        "changes": [{"feature": 3, "mode": "add", "value": 80.0}],
    }
    other = {**change, "changes": [{"feature": 4, "mode": "add", "value": 80.0}]}
    expected = [fresh.ask(LONG, [one], max_tokens=8).token_ids for one in (change, other)]
    again = [fresh.ask(LONG, [one], max_tokens=8) for one in (change, other)]
    assert [reply.token_ids for reply in again] == expected
    assert all(reply.num_cached_tokens > 64 for reply in again)
    assert expected[0] != expected[1]
    assert fresh.ask(LONG, max_tokens=8).num_cached_tokens == 0


def test_features_read_after_a_cache_hit_have_every_row(fresh: Engine) -> None:
    read = {"op": "features", "dictionary": random_dictionary(5, WIDTH), "features": [1, 2], "name": "f"}
    cold = fresh.ask(LONG, [read], max_tokens=2)
    fresh.ask(LONG, max_tokens=1)
    assert fresh.ask(LONG, max_tokens=1).num_cached_tokens > 64
    warm = fresh.ask(LONG, [read], max_tokens=2)
    found, expected = warm.result("f"), cold.result("f")
    assert isinstance(found, CollectedFeatures)
    assert isinstance(expected, CollectedFeatures)
    assert list(found.rows()) == list(expected.rows())
    assert found.positions == [*range(len(fresh.token_ids(LONG)) + 1)]
