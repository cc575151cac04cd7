"""Chunked prefill: the same results as the simple case, each position once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nnsight_engine.plans.collect.results import CollectedCapture, CollectedProbe
from tests.e2e.harness import Ask, Engine, Reply, random_vector
from tests.families.checkpoints import write_checkpoint

pytestmark = pytest.mark.e2e

TEXT = "The history of the city begins with a small settlement by the river, and then it grew. " * 6
POINTS = ["layers.0.output", "layers.14.output", "layers.29.output", "layers.7.attn.output"]


INTERVENTIONS: list[dict[str, Any]] = [
    {"op": "steer", "at": "layers.5.output", "vector": random_vector(0), "where": {"range": [10, None]}},
    {
        "op": "patch",
        "at": "layers.3.output",
        "values": [random_vector(1), random_vector(2)],
        "where": {"positions": [70, 5]},
    },
    {"op": "capture", "at": POINTS, "name": "all"},
    {"op": "capture", "at": POINTS[1], "name": "mean", "reduce": "mean"},
    {
        "op": "probe",
        "at": POINTS[1],
        "weights": random_vector(3),
        "name": "probe",
        "where": {"positions": [-1, 3]},
    },
    {"op": "logit_lens", "layers": [10], "top_k": 1, "name": "lens", "where": {"positions": [-1]}},
    {"op": "capture", "at": "logits", "name": "logits", "where": {"positions": [2, 66]}},
]


@pytest.fixture(scope="module")
def simple(narrow: Path) -> Reply:
    """Run the request with its prompt in one step.

    Not in the shared engine: closing one of this module's engines ends vLLM's state of the process.
    """
    engine = Engine(narrow, dtype="float32", max_num_batched_tokens=1024)
    try:
        return engine.ask(TEXT, INTERVENTIONS, max_tokens=12)
    finally:
        engine.close()


def assert_same(reply: Reply, expected: Reply) -> None:
    """Assert equal tokens, rows and numbers, and no position twice."""
    assert reply.failure is None
    assert reply.token_ids == expected.token_ids
    assert reply.collected is not None
    assert expected.collected is not None
    assert reply.collected.applied == expected.collected.applied
    for name in ("all", "mean", "logits"):
        result, wanted = reply.result(name), expected.result(name)
        assert isinstance(result, CollectedCapture)
        assert isinstance(wanted, CollectedCapture)
        assert result.positions == wanted.positions
        assert len(set(result.positions)) == len(result.positions)
        for point in wanted.points:
            values, theirs = reply.tensor(name, point), expected.tensor(name, point)
            scale = theirs.abs().amax(dim=-1, keepdim=True)
            torch.testing.assert_close(values / scale, theirs / scale, rtol=1e-3, atol=1e-4)
    probe, wanted_probe = reply.result("probe"), expected.result("probe")
    assert isinstance(probe, CollectedProbe)
    assert isinstance(wanted_probe, CollectedProbe)
    assert probe.positions == wanted_probe.positions
    np.testing.assert_allclose(probe.points[POINTS[1]], wanted_probe.points[POINTS[1]], rtol=1e-3, atol=0.05)


@pytest.mark.parametrize("chunk", [32, pytest.param(50, marks=pytest.mark.heavy)])
def test_chunked_prefill_gives_the_same(narrow: Path, simple: Reply, chunk: int) -> None:
    engine = Engine(narrow, dtype="float32", max_num_batched_tokens=chunk, max_num_seqs=8)
    try:
        assert_same(engine.ask(TEXT, INTERVENTIONS, max_tokens=12), simple)
        group_members = [Ask(TEXT[i:], max_tokens=12) for i in range(3)]
        replies = engine.run([*group_members, Ask(TEXT, INTERVENTIONS, max_tokens=12)])
        assert_same(replies[-1][0], simple)
        mean = {"op": "ablate", "at": "layers.4.output", "method": "mean"}
        # Alone it fits a step; beside others the scheduler may split it, and then it says so.
        assert engine.ask("A short prompt", [mean], max_tokens=2).failure is None
        crowd = [Ask(TEXT, max_tokens=4), Ask("A short prompt of a few more words than that", [mean])]
        (_, (crowded,)) = engine.run(crowd)
        assert crowded.failure is None or crowded.failure.code == "prompt_was_chunked"
    finally:
        engine.close()


def test_a_seed_gives_the_same_tokens_whether_the_prompt_comes_in_chunks(tmp_path: Path) -> None:
    model = write_checkpoint("llama", tmp_path)
    sampling = {"temperature": 1.0, "seed": 5}
    replies = []
    for limit in (128, 32):
        engine = Engine(
            model, dtype="float32", max_model_len=128, max_num_seqs=8, max_num_batched_tokens=limit
        )
        try:
            asks = [Ask(list(range(10, 90)), max_tokens=8, sampling=sampling), Ask([5, 6, 7], max_tokens=8)]
            replies.append([reply.token_ids for (reply,) in engine.run(asks)])
        finally:
            engine.close()
    assert replies[0] == replies[1]
