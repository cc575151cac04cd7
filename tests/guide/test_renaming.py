"""Further names for modules, on one model or on several alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnsight_engine import LanguageModel
from tests.guide.served import Load
from tests.hook_reference import outputs_of


@pytest.fixture(scope="module")
def renamed(gpt2_folder: Path, load: Load) -> LanguageModel:
    """GPT-2 with further names."""
    return load(
        gpt2_folder,
        rename={
            "transformer.h": "layers",
            "mlp": "feedforward",
            ".transformer": ["model", "backbone"],
        },
    )


def test_new_and_old_names_are_the_same_module(renamed: LanguageModel) -> None:
    with renamed.trace("Hello"):
        out1 = renamed.layers[0].feedforward.output.save()
        out2 = renamed.transformer.h[0].mlp.output.save()
    inputs = renamed.tokenizer("Hello", return_tensors="pt")
    assert out1 is out2
    assert torch.equal(out1, *outputs_of(renamed._module, inputs, "transformer.h.0.mlp"))


def test_a_module_can_have_several_further_names(renamed: LanguageModel) -> None:
    assert renamed.model is renamed.transformer
    assert renamed.backbone is renamed.transformer
    assert renamed.backbone.h[1].feedforward is renamed.layers[1].mlp


def test_new_names_take_edits_too(renamed: LanguageModel) -> None:
    with renamed.trace("Hello"):
        renamed.layers[1].output[:] = 0
        zeroed = renamed.transformer.h[1].output.save()
    assert not zeroed.any()


def test_a_cache_knows_the_new_names(renamed: LanguageModel) -> None:
    with renamed.trace("Hello") as tracer:
        cache = tracer.cache()
    assert cache.model.layers[0].output is cache["model.transformer.h.0"].output


def test_a_single_name_and_several_as_the_extension_guide_has_them(gpt2_folder: Path, load: Load) -> None:
    model = load(
        gpt2_folder,
        rename={
            "transformer.h": "layers",
            "transformer.ln_f": "final_norm",
            ".transformer": ["model", "backbone"],
        },
    )
    with model.trace("hello"):
        h0_new = model.layers[0].output.save()
        h0_old = model.transformer.h[0].output.save()
    assert h0_new is h0_old
    assert model.final_norm is model.transformer.ln_f
    assert model.model is model.backbone is model.transformer


def test_a_module_from_below_is_mounted_at_the_root(llama_folder: Path, load: Load) -> None:
    model = load(llama_folder, rename={".model.layers": ".layers"})
    with model.trace("hello"):
        mounted = model.layers[0].output.save()
    assert model.layers is model.model.layers
    inputs = model.tokenizer("hello", return_tensors="pt")
    assert torch.equal(mounted, *outputs_of(model._module, inputs, "model.layers.0"))


def test_one_set_of_names_serves_two_architectures(gpt2_folder: Path, llama_folder: Path, load: Load) -> None:
    rename = {
        "transformer.h": "layers",
        "model.layers": "layers",
        "attn": "attention",
        "self_attn": "attention",
    }
    shapes = []
    for folder in (gpt2_folder, llama_folder):
        model = load(folder, rename=rename)
        with model.trace("hello"):
            attention = model.layers[1].attention.output[0].save()
        shapes.append(attention.shape)
    assert shapes[0] == shapes[1]
