"""Sixteen requests with sixteen vectors in one batch, in float32, where batch sizes do not flip tokens."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.harness import Ask, Engine, random_vector

pytestmark = pytest.mark.e2e

PROMPTS = [
    "The Eiffel Tower is in the city of",
    "I think dogs are",
    "Once upon a time",
    "The best way to learn",
]
MODES = ["add", "norm_match", "clamp", "replace"]


@pytest.fixture
def engine(float32_engine: Engine) -> Engine:
    return float32_engine


def ask(index: int) -> Ask:
    """Return the request with the index-th vector, each in its own way."""
    everywhere = index % 5 == 4
    mode = "add" if everywhere else MODES[index % 4]
    steer = {
        "op": "steer",
        "at": "layers.*.output" if everywhere else f"layers.{index}.output",
        "vector": random_vector(index),
        "scale": 0.5,
        "mode": mode,
        "where": {"phase": "generated"} if mode == "replace" else {},
    }
    capture = {"op": "capture", "at": ["layers.20.output", "layers.29.output"], "name": "c"}
    return Ask(PROMPTS[index % 4], [steer, capture], max_tokens=8)


def test_each_has_the_tokens_and_captures_of_its_own_run(engine: Engine) -> None:
    batch = [ask(index) for index in range(16)]
    together = [reply for (reply,) in engine.run(batch)]
    assert len({tuple(reply.token_ids) for reply in together}) > len(PROMPTS)
    for index, joint in enumerate(together):
        ((alone,),) = engine.run([batch[index]])
        assert joint.token_ids == alone.token_ids
        for point in ("layers.20.output", "layers.29.output"):
            expected = alone.tensor("c", point)
            scale = expected.abs().amax(dim=-1, keepdim=True)
            torch.testing.assert_close(
                joint.tensor("c", point) / scale, expected / scale, rtol=1e-4, atol=1e-4
            )
