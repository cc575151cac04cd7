"""A tree of envoys that mirrors the tree of modules."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine import Envoy, LanguageModel, NNsight
from tests.guide.alone import tokens
from tests.guide.modules import SparseAutoencoder, TinyMLP
from tests.hook_reference import outputs_of


def test_the_tree_mirrors_the_module_tree(gpt2: LanguageModel) -> None:
    envoys = dict(gpt2.named_modules())
    modules = {f"model.{name}".rstrip("."): module for name, module in gpt2._module.named_modules()}
    assert {path: envoy._module for path, envoy in envoys.items() if path in modules} == modules
    assert all(envoy.path == path for path, envoy in envoys.items())
    assert envoys.keys() - modules.keys() == {"model.generator", "model.generator.streamer"}
    assert [path for path in envoys if path in modules] == list(modules)
    assert gpt2.modules() == list(envoys.values())
    assert envoys["model.transformer.h.0.attn"] is gpt2.transformer.h[0].attn


def test_attributes_are_the_modules_own(gpt2: LanguageModel) -> None:
    attention = gpt2.transformer.h[0].attn
    assert attention.num_heads == attention._module.num_heads == 4
    assert gpt2.config is gpt2._module.config
    assert gpt2.lm_head.weight is gpt2.lm_head._module.weight


def test_a_module_that_is_added_joins_the_tree(tiny: NNsight, features: torch.Tensor) -> None:
    tiny.sae = SparseAutoencoder(10, 16)
    tiny._module.layer3 = torch.nn.Linear(2, 4)  # Sequential runs it after the others
    assert isinstance(tiny.sae, Envoy)
    assert tiny.sae.encoder.path == "model.sae.encoder"
    assert isinstance(tiny.layer3, Envoy)
    assert tiny.layer3.path == "model.layer3"
    with tiny.trace(features):
        rebuilt = tiny.sae(tiny.layer1.output).save()
        hidden = tiny.layer3.output.save()
    assert torch.equal(rebuilt, SparseAutoencoder(10, 16)(TinyMLP().layer1(features)))
    assert torch.equal(hidden, tiny._module.layer3(TinyMLP()(features)))


def test_modules_can_be_filtered(gpt2: LanguageModel) -> None:
    attention = gpt2.modules(include_fn=lambda envoy: str(envoy.path).endswith(".attn"))
    assert attention == [block.attn for block in gpt2.transformer.h]
    named = gpt2.modules(include_fn=lambda envoy: "attn" in str(envoy.path), names=True)
    assert named[0][0] == "model.transformer.h.0.attn"


def test_get_finds_an_envoy_by_its_path(gpt2: LanguageModel) -> None:
    assert gpt2.get("transformer.h.0.mlp") is gpt2.transformer.h[0].mlp
    assert gpt2.get("model.transformer.h.0.mlp") is gpt2.transformer.h[0].mlp
    with pytest.raises(AttributeError, match="has no attribute attention"):
        gpt2.get("transformer.h.0.attention")
    with gpt2.trace("Hello"):
        hidden = gpt2.get("transformer.h.2").output.save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.2")
    assert torch.equal(hidden, expected)


def test_devices_are_those_of_the_parameters_which_can_be_moved(tiny: NNsight) -> None:
    assert tiny.to(torch.device("cpu"), torch.float64) is tiny
    assert tiny.layer1.weight.dtype is torch.float64
    tiny.cpu()
    assert tiny.devices == {torch.device("cpu")}
    tiny.layer2.to(torch.device("meta"))
    assert tiny.device == torch.device("cpu")
    assert tiny.devices == {torch.device("cpu"), torch.device("meta")}


def test_printing_shows_the_structure(tiny: NNsight, gpt2: LanguageModel) -> None:
    assert str(tiny) == str(TinyMLP())
    lines = [line.strip() for line in repr(gpt2).splitlines()]
    assert lines[0] == "GPT2LMHeadModel("
    assert {"(transformer): GPT2Model(", "(0-3): 4 x GPT2Block(", "(attn): GPT2Attention("} <= set(lines)
    assert repr(gpt2.transformer.h[0]).startswith("GPT2Block(\n")
