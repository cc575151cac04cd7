"""A batch of eight of which one intervenes, and what its neighbours may notice: nothing."""

from __future__ import annotations

from typing import Any, Final

from tests.e2e.harness import Ask, Engine, Reply, random_vector

PROMPTS: Final = [
    "The Eiffel Tower is in the city of",
    "I think dogs are",
    "Once upon a time",
    "The best way to learn",
    "In the year 2050",
    "My favourite food is",
    "Water boils at",
    "She opened the door and",
]
INTERVENING: Final = 3


def asks(interventions: list[dict[str, Any]]) -> list[Ask]:
    """Return a batch of 8 of which one intervenes."""
    return [
        Ask(prompt, interventions if i == INTERVENING else [], max_tokens=12, sampling={"logprobs": 5})
        for i, prompt in enumerate(PROMPTS)
    ]


INTERVENTIONS: Final[dict[str, list[dict[str, Any]]]] = {
    "steer at one layer": [{"op": "steer", "at": "layers.15.output", "vector": random_vector(1), "scale": 3}],
    "steer at all layers": [{"op": "steer", "at": "layers.*.output", "vector": random_vector(1), "scale": 1}],
    "capture everywhere": [{"op": "capture", "at": "layers.*.output"}],
    "lens": [{"op": "logit_lens", "layers": "all"}],
    "hooks": [{"op": "ablate", "at": "layers.4.mlp.act"}, {"op": "capture", "at": "layers.*.attn.q"}],
    "logits": [{"op": "ablate", "at": "logits", "units": list(range(40000))}],
}


WRITING: Final = {"steer at one layer", "steer at all layers", "hooks", "logits"}


def assert_neighbours_notice_nothing(engine: Engine, plain: list[Reply], name: str) -> Reply:
    """Run the batch with one request intervening; the others equal ``plain`` bit for bit."""
    replies = [reply for (reply,) in engine.run(asks(INTERVENTIONS[name]))]
    for i, (before, after) in enumerate(zip(plain, replies, strict=True)):
        if i != INTERVENING:
            assert after.token_ids == before.token_ids
            assert after.logprobs == before.logprobs
    own = replies[INTERVENING]
    assert own.failure is None
    assert (own.token_ids != plain[INTERVENING].token_ids) == (name in WRITING)
    return own
