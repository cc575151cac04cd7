"""Shapes from fake tensors, and mistakes found before anything runs."""

from __future__ import annotations

import pytest
import torch

import nnsight_engine
from nnsight_engine import LanguageModel


def test_a_scan_gives_shapes_and_runs_nothing(gpt2: LanguageModel) -> None:
    ran: list[type] = []
    hook = gpt2._module.get_submodule("lm_head").register_forward_hook(
        lambda _module, _args, output: ran.append(type(output))
    )
    with gpt2.scan("Hello"):
        dim = nnsight_engine.save(gpt2.transformer.h[0].output.shape[-1])
        hidden_shape = nnsight_engine.save(gpt2.transformer.h[0].output.shape)
        logits_shape = nnsight_engine.save(gpt2.lm_head.output.shape)
    hook.remove()
    num_tokens = len(gpt2.tokenizer("Hello")["input_ids"])
    assert dim == gpt2.config.hidden_size
    assert hidden_shape == (1, num_tokens, gpt2.config.hidden_size)
    assert logits_shape == (1, num_tokens, gpt2.config.vocab_size)
    assert torch.Tensor not in ran  # fake tensors have a class of their own


def test_a_scan_is_a_trace_whose_values_are_to_be_saved(gpt2: LanguageModel) -> None:
    with gpt2.scan("Hello"):
        dim = gpt2.transformer.h[0].output.shape[-1]
    with pytest.raises(NameError, match="dim"):
        dim  # noqa: B018 - reading it is the test


def test_a_scan_needs_no_weights(gpt2_folder: str) -> None:
    model = LanguageModel(gpt2_folder)
    with model.scan("Hello"):
        shape = nnsight_engine.save(model.lm_head.output.shape)
    assert shape[-1] == model.config.vocab_size
    assert model.device == torch.device("meta")


def test_an_index_that_does_not_fit_fails_in_the_scan(gpt2: LanguageModel) -> None:
    with pytest.raises(IndexError, match="out of"), gpt2.scan("Hello"):
        gpt2.transformer.h[0].output[:, 10] = 0


def test_an_index_that_fits_passes_the_scan(gpt2: LanguageModel) -> None:
    with gpt2.scan("Hello"):
        gpt2.transformer.h[0].output[:, 1] = 0
        shape = nnsight_engine.save(gpt2.lm_head.output.shape)
    assert shape[0] == 1


def test_validation_fails_before_the_model_runs(gpt2: LanguageModel) -> None:
    ran: list[str] = []
    hook = gpt2._module.get_submodule("transformer.h.0").register_forward_hook(
        lambda _module, _args, output: ran.append("real") if type(output) is torch.Tensor else None
    )
    with pytest.raises(IndexError, match="out of"), gpt2.trace("Hello", scan=True, validate=True):
        gpt2.transformer.h[0].output[:, 1000] = 0
    hook.remove()
    assert ran == []


def test_validation_of_a_block_that_fits_changes_nothing(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello", scan=True, validate=True):
        gpt2.transformer.h[0].output[:, 1] = 0
        validated = gpt2.lm_head.output.save()
    with gpt2.trace("Hello"):
        gpt2.transformer.h[0].output[:, 1] = 0
        logits = gpt2.lm_head.output.save()
    assert type(validated) is torch.Tensor
    assert torch.equal(validated, logits)
