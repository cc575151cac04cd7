"""Two tensor-parallel ranks give what one gives: experts, mixers, and a model that sums its parts first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from tests.e2e.harness import Engine, Reply, random_vector
from tests.e2e.point_blocks import PROMPT
from tests.e2e.traces import traced_engine
from tests.families.checkpoints import HIDDEN_SIZE, write_checkpoint
from tests.families.reference import reference_activations

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks share the cores."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def on_one_and_two_ranks(model: Path, interventions: list[dict[str, Any]], summand: str) -> list[Reply]:
    """Ask both; of a point that is a sum over ranks, each has a summand, and two do not offer it."""
    replies = []
    for size in (1, 2):
        options: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 32}
        with Engine(model, dtype="float32", tensor_parallel_size=size, **options) as engine:
            replies.append(engine.ask("Hello there, you", interventions, max_tokens=5))
            assert (engine.spec.leaf(summand) is None) == (size > 1)
    assert replies[0].token_ids == replies[1].token_ids
    return replies


def test_two_ranks_force_the_experts_that_one_does(tmp_path: Path) -> None:
    interventions: list[dict[str, Any]] = [
        {"op": "ablate", "at": "layers.1.moe.experts", "method": "vector", "vector": [3, 0]},
        {"op": "capture", "at": "layers.*.moe.experts", "name": "ids"},
        {"op": "capture", "at": "layers.*.moe.weights", "name": "weights"},
    ]
    model = write_checkpoint("qwen3_moe", tmp_path)
    expected, reply = on_one_and_two_ranks(model, interventions, "moe.output")
    for layer in range(4):
        ids, weights = f"layers.{layer}.moe.experts", f"layers.{layer}.moe.weights"
        assert torch.equal(reply.tensor("ids", ids), expected.tensor("ids", ids))
        torch.testing.assert_close(reply.tensor("weights", weights), expected.tensor("weights", weights))
    assert reply.tensor("ids", "layers.1.moe.experts").unique(dim=0).tolist() == [[3, 0]]


def test_two_ranks_have_the_stream_of_a_model_that_sums_attention_and_mlp_first(tmp_path: Path) -> None:
    interventions: list[dict[str, Any]] = [
        {"op": "steer", "at": "layers.1.output", "vector": random_vector(0, HIDDEN_SIZE)},
        {"op": "capture", "at": "layers.*.output", "name": "stream"},
    ]
    model = write_checkpoint("falcon", tmp_path)
    expected, reply = on_one_and_two_ranks(model, interventions, "attn.output")
    for name in (f"layers.{layer}.output" for layer in range(4)):
        values = (reply.tensor("stream", name), expected.tensor("stream", name))
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)  # sums of two ranks round differently


def test_a_block_calls_experts_on_all_ranks(tmp_path: Path) -> None:
    """One rank alone would wait for the sum of the others."""
    checkpoint = write_checkpoint("mixtral", tmp_path)
    expected = reference_activations(checkpoint, PROMPT)
    with traced_engine(checkpoint, tensor_parallel_size=2, max_model_len=128, max_num_seqs=4) as model:
        path = f"{model.path}.{model.layers.points.family.layers}.1.block_sparse_moe.experts"
        experts = model.get(path)
        with model.trace(PROMPT):
            args, kwargs = experts.inputs
            again = experts(*args, **kwargs).clone().save()
            once = experts.output.clone().save()
            logits = model.logits.output.clone().save()
        torch.testing.assert_close(again, once)
        torch.testing.assert_close(once, expected["layers.1.mlp.output"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[0], expected["logits"][-1], rtol=1e-4, atol=1e-4)


def test_a_mixer_s_output_is_whole_and_its_parts_are_refused(tmp_path: Path) -> None:
    """With one group of B and C, of which each rank has a copy."""
    checkpoint = write_checkpoint("falcon_h1", tmp_path)
    expected = reference_activations(checkpoint, PROMPT)
    with traced_engine(checkpoint, tensor_parallel_size=2, max_model_len=128, max_num_seqs=4) as model:
        with model.trace(PROMPT):
            mixed = model.points["layers.1.mixer.output"].clone().save()
            logits = model.logits.output.clone().save()
        torch.testing.assert_close(mixed, expected["layers.1.mixer.output"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[0], expected["logits"][-1], rtol=1e-4, atol=1e-4)
        assert not [name for name in model.points() if name.endswith("mixer.state")]
        mixer = f"{model.path}.{model.layers.points.family.layers}.1.mamba.mamba"
        for name in ("norm", "in_proj"):
            with pytest.raises(SpreadModuleError), model.trace(PROMPT):
                model.get(f"{mixer}.{name}").output.clone().save()
        for held in ("A", "D"):
            with pytest.raises(SpreadModuleError), model.trace(PROMPT):
                getattr(model.get(mixer), held).clone().save()


def test_a_block_cannot_call_what_keeps_a_result_for_the_running_step(tmp_path: Path) -> None:
    """The model's own call would find the block's result, and end the engine."""
    checkpoint = write_checkpoint("deepseek_v3", tmp_path)
    with traced_engine(checkpoint, max_model_len=128, max_num_seqs=4) as model:
        layer = f"{model.path}.{model.layers.points.family.layers}.1.mlp"
        kept = model.get(f"{layer}.experts._shared_experts")
        with pytest.raises(ValueError, match="keeps its result"), model.trace(PROMPT):
            kept(kept.input)
        shared = model.get(f"{layer}.shared_experts")
        with model.trace(PROMPT):
            again = shared(shared.input).clone().save()
            once = shared.output.clone().save()
        torch.testing.assert_close(again, once)
