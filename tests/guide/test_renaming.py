"""Further names for modules, on one model or on several alike; every form of them is in ``unit/envoys``."""

from __future__ import annotations

from pathlib import Path

import torch

from nnsight_engine.envoys.envoy import Envoy
from tests.guide.alone import tokens
from tests.guide.served import Load
from tests.hook_reference import outputs_of


def test_new_and_old_names_are_the_same_module(gpt2_folder: Path, load: Load) -> None:
    rename = {"transformer.h": "layers", "mlp": "feedforward", ".transformer": ["model", "backbone"]}
    model = load(gpt2_folder, rename=rename)
    assert model.backbone is model.model is model.transformer
    with model.trace("Hello") as tracer:
        cache = tracer.cache()
        new = model.layers[0].feedforward.output.save()
        old = model.transformer.h[0].mlp.output.save()
        model.layers[1].output[:] = 0
        zeroed = model.transformer.h[1].output.save()
    assert new is old
    assert torch.equal(new, *outputs_of(model._module, tokens(model, "Hello"), "transformer.h.0.mlp"))
    assert not zeroed.any()
    assert cache.model.layers[0].output is cache["model.transformer.h.0"].output


def test_one_set_of_names_serves_two_architectures(gpt2_folder: Path, llama_folder: Path, load: Load) -> None:
    rename = {
        "transformer.h": "blocks",
        "model.layers": "blocks",
        "attn": "attention",
        "self_attn": "attention",
    }
    for folder in (gpt2_folder, llama_folder):
        model = load(folder, rename=rename)
        with model.trace("Hello"):
            attended = model.blocks[1].attention.output[0].save()
        attention: Envoy = model.blocks[1].attention
        path = str(attention.path).removeprefix("model.")
        ((expected, _),) = outputs_of(model._module, tokens(model, "Hello"), path)
        assert torch.equal(attended, expected)
