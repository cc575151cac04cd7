"""Interventions that are kept, on a copy of the model or on the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nnsight_engine import LanguageModel, save
from tests.guide.alone import generated, tokens
from tests.guide.served import Load
from tests.hook_reference import edited, outputs_of


@pytest.fixture
def model(gpt2_folder: Path, load: Load) -> LanguageModel:
    """A model of its own, to be edited in place."""
    return load(gpt2_folder)


def test_an_edited_copy_applies_the_intervention_and_the_original_does_not(model: LanguageModel) -> None:
    scale = 3.0
    with model.edit() as model_edited:
        model.transformer.h[1].output[:, 1] *= scale
    scale = 100.0  # an edit keeps the values that its variables had

    with model.trace("Hello"):
        out1 = model.transformer.h[1].output.save()
    with model_edited.trace("Hello"):
        out2 = model_edited.transformer.h[1].output.save()
        logits = model_edited.lm_head.output.save()

    def scaled(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[:, 1] *= 3.0
        return hidden

    (untouched,) = outputs_of(model._module, tokens(model, "Hello"), "transformer.h.1")
    with edited(model._module, "transformer.h.1", scaled):
        (expected,) = outputs_of(model._module, tokens(model, "Hello"), "lm_head")
    assert torch.equal(out1, untouched)
    assert torch.equal(out2, scaled(untouched))
    assert torch.equal(logits, expected)
    assert scale == 100.0


def test_defining_an_edit_runs_nothing(local_gpt2: LanguageModel) -> None:
    ran: list[str] = []
    with local_gpt2.edit() as model_edited:
        ran.append("the edit")
        local_gpt2.transformer.h[0].output[0][:] = 0
    assert ran == []
    assert isinstance(model_edited, LanguageModel)
    assert model_edited._module is local_gpt2._module

    with model_edited.trace("Hello"):
        save(0)
    assert ran == ["the edit"]


def test_an_edit_in_place_holds_for_all_traces_until_it_is_cleared(model: LanguageModel) -> None:
    with model.edit(inplace=True):
        model.transformer.h[0].output[0][:] = 0
    for _ in range(2):
        with model.trace("Hello"):
            out = model.transformer.h[0].output[0].save()
        assert not out.any()

    model.clear_edits()
    with model.trace("Hello"):
        out = model.transformer.h[0].output[0].save()
    (expected,) = outputs_of(model._module, tokens(model, "Hello"), "transformer.h.0")
    assert torch.equal(out, expected[0])


def test_edits_add_up_in_the_order_in_which_they_were_made(model: LanguageModel) -> None:
    with model.edit() as doubled:
        model.transformer.h[0].output[:] *= 2
    with doubled.edit() as doubled_and_shifted:
        doubled.transformer.h[0].output[:] += 1

    with doubled_and_shifted.trace("Hello"):
        out = doubled_and_shifted.transformer.h[0].output.save()
    with doubled.trace("Hello"):
        out_doubled = doubled.transformer.h[0].output.save()

    (expected,) = outputs_of(model._module, tokens(model, "Hello"), "transformer.h.0")
    assert torch.equal(out, expected * 2 + 1)
    assert torch.equal(out_doubled, expected * 2)


def test_an_edit_holds_in_every_invoke_and_every_step(model: LanguageModel) -> None:
    with model.edit() as model_edited:
        model.transformer.h[0].output[:] = 0

    with model_edited.trace() as tracer:
        with tracer.invoke("Hello"):
            first = model_edited.transformer.h[0].output.save()
        with tracer.invoke(["World", "Tower"]):
            others = model_edited.transformer.h[0].output.save()
    assert (len(first), len(others)) == (1, 2)
    assert not first.any()
    assert not others.any()

    with model_edited.generate("Hello", max_new_tokens=4) as tracer:
        generated_tokens = tracer.result.save()
    with edited(model._module, "transformer.h.0", torch.zeros_like):
        assert torch.equal(generated_tokens, generated(model, "Hello", max_new_tokens=4))
