"""A tree of envoys that mirrors the tree of modules."""

from __future__ import annotations

import pytest
import torch

import nnsight_engine
from nnsight_engine import Envoy, LanguageModel, NNsight
from tests.guide.alone import tokens
from tests.guide.modules import SparseAutoencoder, TinyMLP
from tests.hook_reference import outputs_of


def test_what_one_writes_is_an_envoy_that_stands_for_the_module(gpt2: LanguageModel) -> None:
    module = gpt2._module
    assert isinstance(gpt2, Envoy)
    assert isinstance(gpt2.transformer, Envoy)
    assert isinstance(gpt2.transformer.h[0].attn, Envoy)
    assert gpt2.transformer._module is module.transformer
    assert gpt2.transformer.h[0]._module is module.get_submodule("transformer.h.0")
    assert gpt2.transformer.h[0].attn._module is module.get_submodule("transformer.h.0.attn")


# 4.1 The envoy tree.


def test_the_tree_mirrors_the_module_tree(gpt2: LanguageModel) -> None:
    mine = {path for path, _ in gpt2.named_modules()}
    theirs = {f"model.{name}" if name else "model" for name, _ in gpt2._module.named_modules()}
    assert theirs <= mine
    assert mine - theirs == {"model.generator", "model.generator.streamer"}


def test_the_tree_is_built_at_once(features: torch.Tensor) -> None:
    model = NNsight(TinyMLP())
    assert list(model.__dict__["_names"]) == ["layer1", "layer2"]
    assert [envoy.path for envoy in model.modules()] == ["model", "model.layer1", "model.layer2"]


def test_every_envoy_has_its_path(gpt2: LanguageModel) -> None:
    assert gpt2.path == "model"
    assert gpt2.transformer.path == "model.transformer"
    assert gpt2.transformer.h.path == "model.transformer.h"
    assert gpt2.transformer.h[0].attn.path == "model.transformer.h.0.attn"
    assert gpt2.lm_head.path == "model.lm_head"


def test_a_path_begins_what_values_are_called(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        attention = gpt2.transformer.h[0].attn
        requester = nnsight_engine.save(gpt2.interleaver.iterate_requester(f"{attention.path}.output"))
    assert requester == "model.transformer.h.0.attn.output.i0"


def test_a_module_set_on_an_envoy_joins_the_tree(tiny: NNsight, features: torch.Tensor) -> None:
    tiny.sae = SparseAutoencoder(10, 16)
    assert isinstance(tiny.sae, Envoy)
    assert tiny.sae.path == "model.sae"
    assert tiny.sae.encoder.path == "model.sae.encoder"
    with tiny.trace(features):
        rebuilt = tiny.sae(tiny.layer1.output).save()
    assert torch.equal(rebuilt, SparseAutoencoder(10, 16)(TinyMLP().layer1(features)))


def test_a_module_added_to_the_model_afterwards_is_found(tiny: NNsight, features: torch.Tensor) -> None:
    tiny._module.layer3 = torch.nn.Linear(2, 4)  # Sequential runs it after the others
    assert isinstance(tiny.layer3, Envoy)
    assert tiny.layer3.path == "model.layer3"
    with tiny.trace(features):
        hidden = tiny.layer3.output.save()
    assert torch.equal(hidden, tiny._module(features))


# 4.9 Device utilities.


def test_device_and_devices_are_those_of_the_parameters(gpt2: LanguageModel, tiny: NNsight) -> None:
    assert gpt2.device == torch.device("cpu")
    assert gpt2.devices == {torch.device("cpu")}
    tiny.layer2._module.to("meta")
    assert tiny.device == torch.device("cpu")
    assert tiny.devices == {torch.device("cpu"), torch.device("meta")}


def test_to_and_cpu_move_the_module(tiny: NNsight) -> None:
    assert tiny.to(torch.device("cpu"), torch.float64) is tiny
    assert tiny.layer1.weight.dtype is torch.float64
    tiny.cpu()
    assert tiny.device == torch.device("cpu")
    tiny.to(torch.device("meta"))
    assert tiny.layer1.weight.device == torch.device("meta")


# 4.10 Navigation.


def test_modules_are_all_envoys_in_order(gpt2: LanguageModel) -> None:
    envoys = gpt2.modules()
    assert all(isinstance(envoy, Envoy) for envoy in envoys)
    assert envoys[0] is gpt2
    paths = [path for path, _ in gpt2.named_modules()]
    theirs = [f"model.{name}" if name else "model" for name, _ in gpt2._module.named_modules()]
    assert [path for path in paths if "generator" not in path] == theirs
    assert "model.transformer.h.0.attn" in paths
    assert dict(gpt2.named_modules())["model.transformer.h.0.attn"] is gpt2.transformer.h[0].attn


def test_modules_can_be_filtered(gpt2: LanguageModel) -> None:
    attention = gpt2.modules(include_fn=lambda envoy: str(envoy.path).endswith(".attn"))
    assert attention == [block.attn for block in gpt2.transformer.h]
    assert (
        gpt2.modules(include_fn=lambda e: "attn" in str(e.path), names=True)[0][0]
        == "model.transformer.h.0.attn"
    )


def test_get_finds_an_envoy_by_its_path(gpt2: LanguageModel) -> None:
    assert gpt2.get("transformer.h.0.mlp") is gpt2.transformer.h[0].mlp
    assert gpt2.get("model.transformer.h.0.mlp") is gpt2.transformer.h[0].mlp
    for layer in range(4):
        assert gpt2.get(f"transformer.h.{layer}") is gpt2.transformer.h[layer]
    with gpt2.trace("Hello"):
        hidden = gpt2.get("transformer.h.2").output.save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.2")
    assert torch.equal(hidden, expected)


def test_get_says_what_is_there_if_a_path_is_wrong(gpt2: LanguageModel) -> None:
    with pytest.raises(AttributeError, match="has no attribute attention"):
        gpt2.get("transformer.h.0.attention")


# 4.11 The underlying module.


def test_the_module_is_underneath(gpt2: LanguageModel) -> None:
    real_module = gpt2.transformer.h[0]._module
    assert type(real_module).__name__ == "GPT2Block"
    assert real_module is gpt2._module.get_submodule("transformer.h.0")
    assert gpt2.lm_head.weight is gpt2.lm_head._module.weight
