"""Mixers and experts over two tensor-parallel ranks: outputs are whole, and no block sees a part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnsight_engine.vllm_backend.traces.errors import SpreadModuleError
from tests.e2e.point_blocks import PROMPT
from tests.e2e.traces import traced_engine
from tests.families.checkpoints import write_checkpoint
from tests.families.reference import reference_activations

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks share the cores."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


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
        with pytest.raises(ValueError, match="keeps its result"), model.trace(PROMPT):  # noqa: PT012 - one block
            args, kwargs = kept.inputs
            kept(*args, **kwargs)
        shared = model.get(f"{layer}.shared_experts")
        with model.trace(PROMPT):
            again = shared(shared.input).clone().save()
            once = shared.output.clone().save()
        torch.testing.assert_close(again, once)
