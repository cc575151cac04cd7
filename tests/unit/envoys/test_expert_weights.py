"""The weights of chosen experts are those that each router of transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from nnsight_engine.envoys.architectures.routing import expert_weights
from tests.families.checkpoints import FAMILIES, LOCAL_FAMILIES, NUM_LAYERS, VARIANTS, write_checkpoint
from tests.families.experts import UNFORCED, factors_of, weights_of
from tests.families.reference import load_reference_model, reference_activations
from tests.families.trees import TREES

PROMPT_IDS = [45, 257, 80, 301, 77, 78, 260, 90]
EXPERTS = {
    "gemma4_moe",
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "granitemoeshared"),
    *("ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "llama4_text", "mixtral", "olmoe"),
    *("minimax_m2", "phimoe"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe"),
}


@pytest.mark.parametrize("family", FAMILIES + LOCAL_FAMILIES + VARIANTS)
def test_the_weights_of_experts_are_those_of_the_router(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(family, tmp_path)
    activations = reference_activations(checkpoint, PROMPT_IDS)
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    layers = [layer for layer in range(NUM_LAYERS) if f"layers.{layer}.moe.router" in activations]
    assert bool(layers) == (family in EXPERTS)
    tree = TREES[config.model_type]
    blocks = [*load_reference_model(checkpoint).get_submodule(tree.layers).children()]
    for layer in layers:
        factors = factors_of(blocks[layer], tree)
        logits, ids = activations[f"layers.{layer}.moe.router"], activations[f"layers.{layer}.moe.experts"]
        expected = activations[f"layers.{layer}.moe.weights"]
        ours = expert_weights(config)
        assert (ours is None) == (config.model_type in UNFORCED)
        if ours is None:
            continue
        torch.testing.assert_close(weights_of(config, logits, ids, factors), expected)
        torch.testing.assert_close(ours.of(logits, ids, factors), expected)
