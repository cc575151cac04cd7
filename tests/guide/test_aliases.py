"""Further names for modules, and modules with names we use too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import tokens
from tests.guide.modules import NamedOutput, TinyMLP
from tests.guide.served import Load
from tests.hook_reference import outputs_of


def test_paths_are_mounted_at_the_root(gpt2_folder: Path, load: Load) -> None:
    model = load(gpt2_folder, rename={".transformer.h": ".blocks", ".transformer.wte": ".embed"})
    assert model.blocks[0] is model.transformer.h[0]
    assert model.embed is model.transformer.wte

    with model.trace("Hello"):
        embedded = model.embed.output.save()
        hidden = model.blocks[0].output.save()
    ids = tokens(model, "Hello")
    expected = outputs_of(model._module, ids, "transformer.wte", "transformer.h.0")
    assert torch.equal(embedded, expected[0])
    assert torch.equal(hidden, expected[1])


def test_one_name_serves_different_architectures(gpt2_folder: Path, llama_folder: Path, load: Load) -> None:
    rename = {
        "attn": "attention",
        "self_attn": "attention",
        "transformer.h": "blocks",
        "model.layers": "blocks",
    }
    for folder in (gpt2_folder, llama_folder):
        model = load(folder, rename=rename)
        with model.trace("Hello"):
            attended = model.blocks[1].attention.output[0].save()
        path = model.blocks[1].attention.path.removeprefix("model.")
        ((expected, _),) = outputs_of(model._module, tokens(model, "Hello"), path)
        assert torch.equal(attended, expected)


def test_a_simple_rename_holds_beside_the_original_name(features: torch.Tensor) -> None:
    model = NNsight(TinyMLP(), rename={"layer1": "first_layer"})
    assert model.first_layer is model.layer1
    with model.trace(features):
        hidden = model.first_layer.output.save()
    assert torch.equal(hidden, TinyMLP().layer1(features))


def test_one_path_may_have_many_names(gpt2_folder: Path, load: Load) -> None:
    rename = {".transformer": ["backbone", "mdl"]}
    model = load(gpt2_folder, rename=rename)
    assert model.backbone is model.mdl is model.transformer


def test_further_names_are_shown_in_the_printed_tree(features: torch.Tensor) -> None:
    model = NNsight(TinyMLP(), rename={"layer1": "first_layer"})
    assert "first_layer" in str(model)


# 4.6 Handling conflicts.


def test_a_module_called_output_is_found_under_its_name_and_ours_under_nns(features: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match=r"called `output`.*`\.nns_output`"):
        model = NNsight(NamedOutput())

    with model.trace(features):
        of_the_module = model.output.output.save()
        of_the_model = model.nns_output.save()

    plain = NamedOutput()
    assert isinstance(model.output._module, torch.nn.Linear)
    assert torch.equal(of_the_module, plain.output(plain.hidden(features)))
    assert torch.equal(of_the_model, plain(features))


def test_other_models_keep_their_output_property(features: torch.Tensor, tiny: NNsight) -> None:
    with pytest.warns(UserWarning, match="called `output`"):
        NNsight(NamedOutput())
    with tiny.trace(features):
        out = tiny.output.save()
    assert torch.equal(out, tiny._module(features))
    assert not hasattr(type(tiny), "nns_output")


def test_a_model_of_transformers_with_modules_called_output(bert: LanguageModel) -> None:
    with bert.trace("Hello"):
        layer = bert.bert.encoder.layer[0]
        attended = layer.attention.output.output.save()
        whole = layer.attention.nns_output[0].save()
        hidden = layer.nns_output.save()
    ids = tokens(bert, "Hello")
    root = "bert.encoder.layer.0"
    expected = outputs_of(bert._module, ids, f"{root}.attention.output", f"{root}.attention", root)
    assert torch.equal(attended, expected[0])
    assert torch.equal(whole, expected[1][0])
    assert torch.equal(hidden, expected[2])
