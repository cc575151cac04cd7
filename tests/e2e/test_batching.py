"""Requests in one batch do not notice each other, and each gets what it would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import Ask, Engine, Reply, random_vector

pytestmark = pytest.mark.e2e

PROMPTS = [
    "The Eiffel Tower is in the city of",
    "I think dogs are",
    "Once upon a time",
    "The best way to learn",
    "In the year 2050",
    "My favourite food is",
    "Water boils at",
    "She opened the door and",
]
STEERED = 3


def asks(interventions: list[dict[str, Any]]) -> list[Ask]:
    """Return a batch of 8 of which one intervenes."""
    return [
        Ask(prompt, interventions if i == STEERED else [], max_tokens=12, sampling={"logprobs": 5})
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def engine(bundled: Path) -> Iterator[Engine]:
    """Serve the bundled model in its own bfloat16."""
    engine = Engine(bundled, enable_prefix_caching=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Reply]:
    """Run the batch with nobody intervening."""
    return [reply for (reply,) in engine.run(asks([]))]


INTERVENTIONS: dict[str, list[dict[str, Any]]] = {
    "steer at one layer": [{"op": "steer", "at": "layers.15.output", "vector": random_vector(1), "scale": 3}],
    "steer at all layers": [{"op": "steer", "at": "layers.*.output", "vector": random_vector(1), "scale": 1}],
    "capture everywhere": [{"op": "capture", "at": "layers.*.output"}],
    "lens": [{"op": "logit_lens", "layers": "all"}],
    "hooks": [{"op": "ablate", "at": "layers.4.mlp.act"}, {"op": "capture", "at": "layers.*.attn.q"}],
    "logits": [{"op": "ablate", "at": "logits", "units": list(range(40000))}],
}


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_seven_neighbours_are_bit_identical(engine: Engine, plain: list[Reply], name: str) -> None:
    replies = [reply for (reply,) in engine.run(asks(INTERVENTIONS[name]))]
    for i, (before, after) in enumerate(zip(plain, replies, strict=True)):
        if i != STEERED:
            assert after.token_ids == before.token_ids
            assert after.logprobs == before.logprobs
    intervening = replies[STEERED]
    assert intervening.failure is None
    writes = name in {"steer at one layer", "steer at all layers", "hooks", "logits"}
    assert (intervening.token_ids != plain[STEERED].token_ids) == writes


def test_a_capture_does_not_change_its_own_request(engine: Engine, plain: list[Reply]) -> None:
    replies = [reply for (reply,) in engine.run(asks(INTERVENTIONS["capture everywhere"]))]
    assert replies[STEERED].logprobs == plain[STEERED].logprobs


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
    assert len({tuple(reply.token_ids) for reply in replies}) > 1
    for reply in replies:
        assert reply.tensor("s", "samples").tolist() == reply.token_ids
        assert torch.equal(reply.tensor("c", "layers.3.output"), replies[0].tensor("c", "layers.3.output"))


def test_where_by_token_follows_what_was_generated(engine: Engine) -> None:
    ids = engine.token_ids(PROMPTS[2])
    plain = engine.ask(PROMPTS[2], max_tokens=12)
    token = plain.token_ids[4]
    probe = {"op": "probe", "at": "layers.3.output", "weights": random_vector(1), "name": "p"}
    reply = engine.ask(PROMPTS[2], [{**probe, "where": {"tokens": [token]}}], max_tokens=12)
    fed = ids + reply.token_ids[:-1]
    assert reply.result("p").positions == [p for p, fed_token in enumerate(fed) if fed_token == token]
