"""Blocks that are kept, on a copy of the model or on the model itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nnsight_engine import LanguageModel
from tests.hook_reference import edited, outputs_of


@pytest.fixture
def model(gpt2: LanguageModel) -> Iterator[LanguageModel]:
    """The shared model, without edits afterwards."""
    yield gpt2
    gpt2.clear_edits()


def test_an_edit_makes_a_model_of_its_own(model: LanguageModel) -> None:
    with model.edit() as model_edited:
        model.transformer.h[1].output[:, 1] = 0
    with model.trace("Hello"):
        out1 = model.transformer.h[1].output.save()
    with model_edited.trace("Hello"):
        out2 = model_edited.transformer.h[1].output.save()
        logits = model_edited.lm_head.output.save()

    def zeroed(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[:, 1] = 0
        return hidden

    inputs = model.tokenizer("Hello", return_tensors="pt")
    (untouched,) = outputs_of(model._module, inputs, "transformer.h.1")
    with edited(model._module, "transformer.h.1", zeroed):
        (expected,) = outputs_of(model._module, inputs, "lm_head")
    assert torch.equal(out1, untouched)
    assert torch.equal(out2, zeroed(untouched))
    assert torch.equal(logits, expected)


def test_an_edit_in_place_holds_for_all_traces_until_cleared(model: LanguageModel) -> None:
    with model.edit(inplace=True):
        model.transformer.h[1].output[:] = 0
    with model.trace("Hello"):
        output = model.transformer.h[1].output.save()
    with model.trace("World"):
        again = model.transformer.h[1].output.save()
    assert not output.any()
    assert not again.any()
    model.clear_edits()
    with model.trace("Hello"):
        restored = model.transformer.h[1].output.save()
    inputs = model.tokenizer("Hello", return_tensors="pt")
    assert torch.equal(restored, *outputs_of(model._module, inputs, "transformer.h.1"))


def test_an_edit_holds_for_every_row_and_invoke(model: LanguageModel) -> None:
    with model.edit() as model_edited:
        model.transformer.h[1].output[:] = 0
    with model_edited.trace() as tracer:
        with tracer.invoke("Hello"):
            first = model_edited.transformer.h[1].output.save()
        with tracer.invoke(["World", "Test"]):
            others = model_edited.transformer.h[1].output.save()
    assert (len(first), len(others)) == (1, 2)
    assert not first.any()
    assert not others.any()
