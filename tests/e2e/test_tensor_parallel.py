"""Two ranks give what one gives: every rank applies the writes, one hands out the reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.harness import Engine, random_vector
from tests.families.checkpoints import write_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]


@pytest.fixture
def on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of two ranks share the cores."""
    monkeypatch.setitem(os.environ, "VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("on_two_ranks")
def test_two_ranks_force_the_experts_that_one_does(tmp_path: Path) -> None:
    model = write_checkpoint("qwen3_moe", tmp_path)
    interventions: list[dict[str, Any]] = [
        {"op": "ablate", "at": "layers.1.moe.experts", "method": "vector", "vector": [3, 0]},
        {"op": "capture", "at": "layers.*.moe.experts", "name": "ids"},
        {"op": "capture", "at": "layers.*.moe.weights", "name": "weights"},
    ]
    replies = []
    for size in (1, 2):
        options: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 32}
        engine = Engine(model, dtype="float32", tensor_parallel_size=size, **options)
        replies.append(engine.ask("Hello there, you", interventions, max_tokens=5))
        # Of what experts add, each of two ranks has a summand.
        assert (engine.spec.leaf("moe.output") is None) == (size > 1)
        engine.close()
    expected, reply = replies
    assert reply.token_ids == expected.token_ids
    for layer in range(4):
        ids, weights = f"layers.{layer}.moe.experts", f"layers.{layer}.moe.weights"
        assert torch.equal(reply.tensor("ids", ids), expected.tensor("ids", ids))
        torch.testing.assert_close(reply.tensor("weights", weights), expected.tensor("weights", weights))
    assert reply.tensor("ids", "layers.1.moe.experts").unique(dim=0).tolist() == [[3, 0]]


@pytest.mark.usefixtures("on_two_ranks")
def test_two_ranks_have_the_stream_of_a_model_that_sums_attention_and_mlp_first(tmp_path: Path) -> None:
    model = write_checkpoint("falcon", tmp_path)
    replies = []
    for size in (1, 2):
        options: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 32}
        engine = Engine(model, dtype="float32", tensor_parallel_size=size, **options)
        interventions: list[dict[str, Any]] = [
            {"op": "steer", "at": "layers.1.output", "vector": random_vector(0, engine.spec.hidden_size)},
            {"op": "capture", "at": "layers.*.output", "name": "stream"},
        ]
        replies.append(engine.ask("Hello there, you", interventions, max_tokens=5))
        assert (engine.spec.leaf("attn.output") is None) == (size > 1)
        engine.close()
    expected, reply = replies
    assert reply.token_ids == expected.token_ids
    for layer in range(4):
        name = f"layers.{layer}.output"
        values = (reply.tensor("stream", name), expected.tensor("stream", name))
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)  # sums of two ranks round differently
