"""Shapes from fake tensors, and mistakes found before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight, save
from tests.guide.alone import module_of
from tests.guide.modules import TinyMLP


def test_a_scan_gives_shapes_of_what_is_saved(gpt2: LanguageModel) -> None:
    with gpt2.scan("Hello"):
        shape = save(gpt2.transformer.h[0].output.shape)
        unsaved = gpt2.transformer.h[1].output.shape
        logits_shape = save(gpt2.lm_head.output.shape)
    assert shape == (1, 5, 128)
    assert logits_shape == (1, 5, gpt2.config.vocab_size)
    with pytest.raises(UnboundLocalError):
        _ = unsaved


def test_a_scan_runs_on_fake_tensors_and_leaves_the_weights_alone(local_gpt2: LanguageModel) -> None:
    weight = local_gpt2.lm_head.weight
    before = weight.detach().clone()
    with local_gpt2.scan("Hello"):
        kind = save(type(local_gpt2.transformer.h[0].output).__name__)
    assert kind == "FakeTensor"
    assert local_gpt2.lm_head.weight is weight
    assert torch.equal(weight, before)
    assert type(module_of(local_gpt2)(torch.tensor([[1]])).logits) is torch.Tensor


def test_a_scan_needs_no_weights(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder)
    with model.scan("Hello"):
        shape = save(model.lm_head.output.shape)
    assert shape[-1] == model.config.vocab_size
    assert model.device == torch.device("meta")
    assert not model.dispatched


def test_an_index_that_does_not_fit_fails_in_the_scan(gpt2: LanguageModel) -> None:
    with pytest.raises(IndexError, match="out of"), gpt2.scan("Hello"):
        gpt2.transformer.h[0].output[0][10] = 0  # five tokens
    with gpt2.scan("Hello world"):
        gpt2.transformer.h[0].output[0][10] = 0  # eleven


def test_after_a_scan_shapes_are_on_the_envoys(features: torch.Tensor) -> None:
    model = NNsight(TinyMLP())
    with pytest.raises(ValueError, match="nor has a fake output set"):
        _ = model.layer1.output
    with model.scan(features):
        save(0)
    assert model.layer1._fake_output.shape == (1, 10)
    assert model.layer1.output.shape == (1, 10)
    assert model.layer2._fake_inputs[0][0].shape == (1, 10)
    assert model.layer2.input.shape == (1, 10)
    assert model.layer2.inputs[0][0].shape == (1, 10)


def test_a_trace_can_be_validated_before_it_runs(tiny: NNsight, features: torch.Tensor) -> None:
    ran: list[str] = []
    tiny.layer1._module.register_forward_hook(lambda *args: ran.append(type(args[-1]).__name__))
    with pytest.raises(RuntimeError, match="must match"), tiny.trace(features, scan=True, validate=True):
        tiny.layer1.output[:] = torch.zeros(7)
    assert ran == ["FakeTensor"]
    with tiny.trace(features, validate=True):
        tiny.layer1.output[:] = torch.zeros(10)
        out = tiny.output.save()
    assert ran[1:] == ["FakeTensor", "Tensor"]
    assert torch.equal(out, TinyMLP().layer2(torch.zeros(1, 10)))
