"""Requests in one batch do not affect each other: each gets the result that it gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine.plans.collect.results import CollectedProbe
from tests.e2e.harness import Ask, Engine, Reply, random_vector
from tests.e2e.neighbours import INTERVENING, INTERVENTIONS, PROMPTS, asks, assert_neighbours_notice_nothing
from tests.narrow_model import WIDTH

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine(narrow: Path) -> Iterator[Engine]:
    with Engine(narrow, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Reply]:
    return [reply for (reply,) in engine.run(asks([]))]


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_seven_neighbours_are_bit_identical(engine: Engine, plain: list[Reply], name: str) -> None:
    own = assert_neighbours_notice_nothing(engine, plain, name)
    assert own.collected is not None
    assert own.collected.tier in ({"eager"} if name == "hooks" else {"tap", "graph"})


def test_a_capture_does_not_change_its_own_request(engine: Engine, plain: list[Reply]) -> None:
    replies = [reply for (reply,) in engine.run(asks(INTERVENTIONS["capture everywhere"]))]
    assert replies[INTERVENING].logprobs == plain[INTERVENING].logprobs


def test_several_choices_each_carry_their_own_results(engine: Engine) -> None:
    interventions: list[dict[str, Any]] = [
        {"op": "steer", "at": "layers.15.output", "vector": random_vector(3), "scale": 0.1},
        {"op": "capture", "at": "samples", "name": "s"},
        {"op": "capture", "at": "layers.3.output", "name": "c", "where": {"phase": "prompt"}},
    ]
    ask = Ask(
        PROMPTS[0],
        interventions,
        max_tokens=10,
        sampling={"n": 4, "temperature": 1.0},
    )
    (replies,) = engine.run([ask])
    assert [len(reply.token_ids) for reply in replies] == [10] * 4
    assert len({tuple(reply.token_ids) for reply in replies}) > 1
    for reply in replies:
        assert reply.tensor("s", "samples").tolist() == reply.token_ids
        assert torch.equal(reply.tensor("c", "layers.3.output"), replies[0].tensor("c", "layers.3.output"))


def test_a_read_that_meets_no_position_still_has_a_result(engine: Engine) -> None:
    where = {"phase": "generated", "tokens": [0]}
    interventions: list[dict[str, Any]] = [
        {"op": "capture", "at": ["layers.3.output", "layers.3.mlp.act"], "name": "c", "where": where},
        {"op": "probe", "at": "layers.3.output", "weights": random_vector(1), "name": "p", "where": where},
        {"op": "logit_lens", "layers": [29], "name": "l", "where": where},
    ]
    reply = engine.ask(PROMPTS[2], interventions, max_tokens=4)
    assert [reply.result(name).positions for name in "cpl"] == [[], [], []]
    assert reply.tensor("c", "layers.3.mlp.act").shape == (0, 2 * WIDTH)


def test_logits_of_two_requests_in_one_batch_are_their_own(engine: Engine) -> None:
    capture = {
        "op": "capture",
        "at": "logits",
        "dtype": "float32",
        "name": "c",
        "where": {"positions": [1, -1]},
    }
    probe = {"op": "probe", "at": "logits", "weights": [1.0] * engine.spec.vocab_size, "name": "p"}
    batch = [Ask(prompt, [capture, probe], max_tokens=2) for prompt in PROMPTS[:2]]
    for ask, (joint,) in zip(batch, engine.run(batch), strict=True):
        ((alone,),) = engine.run([ask])
        assert joint.result("c").positions == alone.result("c").positions
        torch.testing.assert_close(
            joint.tensor("c", "logits"), alone.tensor("c", "logits"), rtol=0.05, atol=0.5
        )
        both = joint.result("p")
        assert isinstance(both, CollectedProbe)
        totals = joint.tensor("c", "logits").sum(dim=-1).tolist()
        assert [both.points["logits"][p] for p in joint.result("c").positions] == pytest.approx(
            totals, rel=1e-3, abs=5
        )


def test_where_by_token_follows_what_was_generated(engine: Engine) -> None:
    ids = engine.token_ids(PROMPTS[2])
    plain = engine.ask(PROMPTS[2], max_tokens=12)
    token = plain.token_ids[4]
    probe = {"op": "probe", "at": "layers.3.output", "weights": random_vector(1), "name": "p"}
    reply = engine.ask(PROMPTS[2], [{**probe, "where": {"tokens": [token]}}], max_tokens=12)
    fed = ids + reply.token_ids[:-1]
    assert reply.result("p").positions == [p for p, fed_token in enumerate(fed) if fed_token == token]
