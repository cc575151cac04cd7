"""A tiny model with names and classes of the test's own: an engine that modules share, and transformers'."""

# mypy: disable-error-code="no-redef"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP as LocalMLP
from vllm import SamplingParams
from vllm.model_executor.models.llama import LlamaMLP

from nnsight_engine import Envoy, LanguageModel, eproperty
from nnsight_engine.envoys.eproperty import requires_output
from nnsight_engine.vllm_backend.compat import EngineLimits
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.e2e.traces import traced_engine

PROMPT = "I think dogs are good"
OTHER = "I love the tower of Rome"
LONG = " the dogs of Paris hate cats and" * 12
GREEDY: dict[str, Any] = {"temperature": 0.0}
RENAME: dict[str, Any] = {
    "model.layers": "blocks",
    "mlp": ["ff", "feed"],
    "layers": "stages",
    "attn": "attention",
}
DIRECTION = torch.randn(128, generator=torch.Generator().manual_seed(0))


class HalfEnvoy(Envoy):
    """Stands for an MLP, and gives half of what that returns."""

    @eproperty(key="output")
    @requires_output
    def half(self) -> Any:
        """Half of the output."""

    @half.preprocess
    def half(self, value: torch.Tensor) -> torch.Tensor:
        return value * 0.5

    @half.transform
    def half(value: torch.Tensor) -> torch.Tensor:  # noqa: N805 - the documented form
        return value * 2


def renamed_engine(checkpoint: Path) -> AbstractContextManager[VLLM]:
    """Start an engine with steps of 64 tokens and memory for 24 blocks of 32."""
    options: dict[str, Any] = {
        "rename": RENAME,
        "envoys": {LlamaMLP: HalfEnvoy, "embed_tokens": HalfEnvoy},
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "block_size": 32,
        "num_gpu_blocks_override": 24,
        "limits": EngineLimits(trace_step_s=5.0, max_trace_bytes=4_000_000, max_edits=3),
    }
    return traced_engine(checkpoint, **options)


@pytest.fixture
def model(renamed_model: VLLM) -> Iterator[VLLM]:
    """Give the engine to a test, which leaves no edit behind."""
    yield renamed_model
    renamed_model.clear_edits()
    for name in renamed_model.edits:
        renamed_model.remove_edit(name)


@pytest.fixture(scope="module")
def local(renamed_checkpoint: Path) -> LanguageModel:
    """Load the same model for transformers."""
    return LanguageModel(
        str(renamed_checkpoint),
        rename=RENAME,
        envoys={LocalMLP: HalfEnvoy, "embed_tokens": HalfEnvoy},
        dtype=torch.float32,
        attn_implementation="eager",
    )


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Check that two engines agree; transformers' values have an axis more."""
    torch.testing.assert_close(ours, theirs.detach()[0], rtol=1e-3, atol=1e-3)


def plain_tokens(model: VLLM, prompt: str, max_tokens: int) -> list[int]:
    """Return what the engine generates by itself."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **GREEDY)
    (output,) = model.engine.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)
