"""Shapes without computing anything."""

from __future__ import annotations

import pytest
import torch

import nnsight_engine
from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import module_of
from tests.guide.modules import TinyMLP


def test_a_scan_gives_shapes(gpt2: LanguageModel) -> None:
    with gpt2.scan("Hello"):
        dim = nnsight_engine.save(gpt2.transformer.h[0].output[0].shape[-1])
        shape = nnsight_engine.save(gpt2.lm_head.output.shape)
    assert dim == 128
    assert shape == (1, 5, gpt2.config.vocab_size)


def test_a_scan_runs_on_fake_tensors_and_leaves_the_weights_alone(gpt2: LanguageModel) -> None:
    weight = gpt2.lm_head.weight
    before = weight.detach().clone()
    with gpt2.scan("Hello"):
        kind = nnsight_engine.save(type(gpt2.transformer.h[0].output).__name__)
    assert kind == "FakeTensor"
    assert gpt2.lm_head.weight is weight
    assert torch.equal(weight, before)
    assert type(module_of(gpt2)(torch.tensor([[1]])).logits) is torch.Tensor


def test_a_scan_finds_an_index_out_of_range(gpt2: LanguageModel) -> None:
    with pytest.raises(IndexError), gpt2.scan("Hello"):
        gpt2.transformer.h[0].output[0][10] = 0  # five tokens
    with gpt2.scan("Hello world"):
        gpt2.transformer.h[0].output[0][10] = 0  # eleven


def test_a_scan_finds_shapes_that_do_not_fit(tiny: NNsight, features: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="must match"), tiny.scan(features):
        tiny.layer1.output[:] = torch.zeros(7)


def test_what_is_not_saved_in_a_scan_is_gone(gpt2: LanguageModel) -> None:
    with gpt2.scan("Hello"):
        dim = gpt2.transformer.h[0].output.shape[-1]
    with pytest.raises(UnboundLocalError):
        _ = dim


def test_after_a_scan_shapes_are_on_the_envoys(features: torch.Tensor) -> None:
    model = NNsight(TinyMLP())
    with pytest.raises(ValueError, match="nor has a fake output set"):
        _ = model.layer1.output
    with model.scan(features):
        nnsight_engine.save(0)
    assert model.layer1._fake_output.shape == (1, 10)
    assert model.layer1.output.shape == (1, 10)
    assert model.layer2.input.shape == (1, 10)
    assert model.layer2.inputs[0][0].shape == (1, 10)


def test_a_trace_can_be_validated_before_it_runs(tiny: NNsight, features: torch.Tensor) -> None:
    ran: list[str] = []
    tiny.layer1._module.register_forward_hook(lambda *args: ran.append(type(args[-1]).__name__))
    with pytest.raises(RuntimeError, match="must match"), tiny.trace(features, validate=True):
        tiny.layer1.output[:] = torch.zeros(7)
    assert ran == ["FakeTensor"]
