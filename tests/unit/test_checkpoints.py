"""The tiny checkpoints are real models: they load, tokenize anything, and tell prompts apart."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from nnsight_engine.envoys.architectures.routing import expert_weights
from tests.families.checkpoints import (
    FAMILIES,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    LOCAL_FAMILIES,
    NUM_LAYERS,
    VARIANTS,
    WORDS,
    write_checkpoint,
)
from tests.families.experts import UNFORCED, factors_of, weights_of
from tests.families.reference import load_reference_model, reference_activations
from tests.families.trees import TREES

if TYPE_CHECKING:
    from pathlib import Path

PROMPT_IDS = [45, 257, 80, 301, 77, 78, 260, 90]
UNGATED = {
    *("gpt2", "opt", "opt_post_norm", "gpt_neox", "gpt_neox_sequential", "nemotron", "phi", "starcoder2"),
    *("nemotron_h", "gpt_bigcode", "gptj", "bloom", "falcon", "falcon_multi_query", "apertus", "arcee"),
}
EXPERTS = {
    "gemma4_moe",
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "granitemoeshared"),
    *("ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "llama4_text", "mixtral", "olmoe"),
    *("minimax_m2", "phimoe"),
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe"),
}
MLA = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}
STREAMS = {"gemma3n"}
"""Families whose blocks pass on several residual streams."""
BESIDE_MLP = {"gemma4_moe"}
"""Families whose blocks have experts and an MLP."""
BORROWED = dict.fromkeys({"gemma3n", "gemma4"}, (2, 3))
"""Layers that use the keys and values of others."""
SHARED = {"glm4_moe", "granitemoeshared", *MLA}
UNORDERED = {"llama4_text"}
"""Families whose queries and keys are not in the same order on both engines."""
DENSE = {
    **dict.fromkeys({"ernie4_5_moe", "glm4_moe", *MLA}, (0,)),
    "llama4_text": (0, 2),
    "qwen3_next": (0, 1, 2),
}
HYBRIDS = {
    "granitemoehybrid": ["mixer", "attn"] * 2,
    "lfm2": ["mixer", "attn"] * 2,
    "mamba2": ["mixer"] * 4,
    "nemotron_h": ["mixer", "attn", "mlp", "mixer"],
    **dict.fromkeys(LOCAL_FAMILIES, ["mixer", "attn"] * 2),
    "zamba2": ["mixer"] * 4,
}
"""What blocks have, where it differs."""
INNER = dict.fromkeys(("bloom", "falcon", "falcon_multi_query", "falcon_biased"), 4 * HIDDEN_SIZE)
"""Widths of MLPs, which vLLM fixes for these families."""


STATELESS = {"lfm2", *LOCAL_FAMILIES}
"""Families whose mixers are not Mamba-2's, so that their states are no point."""


@pytest.fixture(scope="module", params=FAMILIES + LOCAL_FAMILIES + VARIANTS)
def family(request: pytest.FixtureRequest) -> str:
    """Every family and variant."""
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family's checkpoint on disk."""
    return write_checkpoint(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def activations(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Transformers' values on one prompt."""
    return reference_activations(checkpoint, PROMPT_IDS)


def test_every_point_is_there_with_its_shape(family: str, activations: dict[str, torch.Tensor]) -> None:
    mlp = {"mlp.input"} | ({"mlp.output"} if family != "granitemoeshared" else set())
    dense = {"mlp.up", "mlp.act", *(set() if family in UNGATED else {"mlp.gate"})}
    attention = {"attn.output", "attn.q", "attn.k", "attn.v", "attn.heads"}
    attention -= {"attn.q", "attn.k"} if family in UNORDERED else set()
    attention = attention - {"attn.q", "attn.k", "attn.v"} | {"attn.latent"} if family in MLA else attention
    if family == "falcon_biased":  # vLLM adds biases where no module returns the sum
        attention, mlp, dense = {"attn.heads"}, {"mlp.input"}, {"mlp.act"}
    stream = {"input", "output"} if family not in STREAMS else set()
    expected = {"logits", *({"embed.output"} if stream else ())} | (
        set() if family == "opt_post_norm" else {"norm.output"}
    )
    for layer in range(NUM_LAYERS):
        has_experts = family in EXPERTS and layer not in DENSE.get(family, ())
        routed = {"moe.router", "moe.experts", "moe.weights", "moe.output"}
        routed |= {"moe.shared.output"} if family in SHARED else set()
        routed -= {"moe.output"} if family == "llama4_text" else set()  # no module returns it
        inner = routed if has_experts else dense
        parts = {
            "attn": attention - ({"attn.k", "attn.v"} if layer in BORROWED.get(family, ()) else set()),
            "mlp": mlp | (routed | dense if family in BESIDE_MLP else inner),
            "mixer": {"mixer.output"} | (set() if family in STATELESS else {"mixer.state"}),
        }
        has = {HYBRIDS[family][layer]} if family in HYBRIDS else {"attn", "mlp"}
        has |= {"mlp"} if family in {"granitemoehybrid", "lfm2", *LOCAL_FAMILIES} else set()
        has |= {"mixer"} if family == "falcon_h1" else set()
        leaves = stream.union(*(parts[part] for part in has))
        expected |= {f"layers.{layer}.{leaf}" for leaf in leaves}
    assert set(activations) == expected
    tokens = len(PROMPT_IDS)
    a_leaf = next(leaf for leaf in ("output", "mlp.output") if f"layers.2.{leaf}" in expected)
    assert activations[f"layers.2.{a_leaf}"].shape == (tokens, HIDDEN_SIZE)
    if "layers.2.mlp.act" in expected:
        # Layers of Gemma 4 without keys have an MLP of twice the width.
        wider = 2 if family == "gemma4" else 1
        width = wider * INNER.get(family, INTERMEDIATE_SIZE)
        assert activations["layers.2.mlp.act"].shape == (tokens, width)
    if "layers.1.attn.q" in expected:
        assert activations["layers.1.attn.v"].shape[2] == activations["layers.1.attn.heads"].shape[2]
        assert activations["layers.1.attn.q"].shape == activations["layers.1.attn.heads"].shape
        assert activations["layers.1.attn.k"].shape[2] == activations["layers.1.attn.q"].shape[2]


def test_the_weights_of_experts_are_those_written_down(
    family: str, checkpoint: Path, activations: dict[str, torch.Tensor]
) -> None:
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


def test_one_layers_output_is_the_next_ones_input(family: str, activations: dict[str, torch.Tensor]) -> None:
    if family in STREAMS:
        assert not any(f"layers.{layer}.output" in activations for layer in range(NUM_LAYERS))
        return
    for layer in range(NUM_LAYERS - 1):
        torch.testing.assert_close(
            activations[f"layers.{layer}.output"], activations[f"layers.{layer + 1}.input"]
        )
    torch.testing.assert_close(activations["embed.output"], activations["layers.0.input"])


def test_logits_differ_by_position(activations: dict[str, torch.Tensor]) -> None:
    logits = activations["logits"]
    assert torch.isfinite(logits).all()
    assert logits.argmax(dim=-1).unique().numel() > 1
    top = logits.topk(2, dim=-1).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-3, "a near tie would make greedy tokens depend on rounding"


def test_same_seed_writes_the_same_weights(family: str, checkpoint: Path, tmp_path: Path) -> None:
    first = load_reference_model(checkpoint).state_dict()
    again = load_reference_model(write_checkpoint(family, tmp_path / "again")).state_dict()
    other = load_reference_model(write_checkpoint(family, tmp_path / "other", seed=1)).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


def test_tokenizer_takes_any_text_and_gives_it_back(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    text = string.printable + " Paris is the city of love — naïve 東京 🗼"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < len(tokenizer)


def test_listed_words_are_single_tokens(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    assert [len(tokenizer.encode(word)) for word in WORDS] == [1] * len(WORDS)
    assert len(tokenizer.encode("I think dogs are")) == 4


def test_unknown_family_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"family must be one of .*llama.*, got 'bert'"):
        write_checkpoint("bert", tmp_path)
