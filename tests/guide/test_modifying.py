"""Values changed in place, by assignment, and within what a module returns as a tuple."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight
from tests.hook_reference import Edit, edited, outputs_of

TEXT = "Hello"


def plain_logits(model: LanguageModel, path: str, edit: Edit) -> torch.Tensor:
    """Return what the head gives when the output of the module at ``path`` is edited by a torch hook."""
    with edited(model._module, path, edit):
        (logits,) = outputs_of(model._module, model.tokenizer(TEXT, return_tensors="pt"), "lm_head")
    assert isinstance(logits, torch.Tensor)
    return logits


def with_last_token_zero(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.clone()
    hidden[:, -1, :] = 0
    return hidden


def with_first_feature_one(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.clone()
    hidden[:, :, 0] = 1
    return hidden


def test_all_activations_can_be_zeroed_in_place(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        gpt2.transformer.h[0].output[:] = 0
        logits = gpt2.lm_head.output.save()
    assert torch.equal(logits, plain_logits(gpt2, "transformer.h.0", torch.zeros_like))


def test_the_last_token_can_be_edited_in_place(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        gpt2.transformer.h[0].output[:, -1, :] = 0
        logits = gpt2.lm_head.output.save()
    assert torch.equal(logits, plain_logits(gpt2, "transformer.h.0", with_last_token_zero))


def test_one_hidden_feature_can_be_edited_in_place(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        gpt2.transformer.h[0].output[:, :, 0] = 1
        logits = gpt2.lm_head.output.save()
    assert torch.equal(logits, plain_logits(gpt2, "transformer.h.0", with_first_feature_one))


def test_a_whole_output_is_replaced_by_assignment(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        hs = gpt2.transformer.h[0].output.clone()
        hs = hs * 2
        gpt2.transformer.h[0].output = hs
        logits = gpt2.lm_head.output.save()
    assert torch.equal(logits, plain_logits(gpt2, "transformer.h.0", lambda hidden: hidden * 2))


def test_an_output_is_replaced_by_an_expression_of_itself(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        gpt2.transformer.wte.output = gpt2.transformer.wte.output * 0.5
        logits = gpt2.lm_head.output.save()
    assert torch.equal(logits, plain_logits(gpt2, "transformer.wte", lambda embeds: embeds * 0.5))


def test_a_module_that_returns_a_tuple_gives_a_tuple(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        full_output = gpt2.transformer.h[0].attn.output.save()
    inputs = gpt2.tokenizer(TEXT, return_tensors="pt")
    (expected,) = outputs_of(gpt2._module, inputs, "transformer.h.0.attn")
    assert isinstance(full_output, tuple)
    assert len(full_output) == len(expected)
    assert torch.equal(full_output[0], expected[0])


def test_a_tuple_is_replaced_as_a_whole(gpt2: LanguageModel) -> None:
    attn = gpt2.transformer.h[0].attn
    with gpt2.trace(TEXT):
        attn.output = (torch.zeros_like(attn.output[0]), *attn.output[1:])
        logits = gpt2.lm_head.output.save()

    def zeroed(output: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.zeros_like(output[0]), *output[1:])

    assert torch.equal(logits, plain_logits(gpt2, "transformer.h.0.attn", zeroed))


def test_the_first_of_a_tuple_is_edited_in_place(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        gpt2.transformer.h[0].attn.output[0][:] = 0
        logits = gpt2.lm_head.output.save()

    def zeroed(output: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.zeros_like(output[0]), *output[1:])

    assert torch.equal(logits, plain_logits(gpt2, "transformer.h.0.attn", zeroed))


def test_assigning_to_an_item_of_a_tuple_is_pythons_own_error(gpt2: LanguageModel) -> None:
    with pytest.raises(TypeError, match="does not support item assignment"), gpt2.trace(TEXT):
        gpt2.transformer.h[0].attn.output[0] = torch.zeros(1)


def test_a_clone_made_before_an_edit_keeps_the_numbers(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        before = gpt2.transformer.h[0].output.clone().save()
        gpt2.transformer.h[0].output[:] = 0
        after = gpt2.transformer.h[0].output.save()
    inputs = gpt2.tokenizer(TEXT, return_tensors="pt")
    assert torch.equal(before, *outputs_of(gpt2._module, inputs, "transformer.h.0"))
    assert not after.any()


def test_without_a_clone_before_is_the_edited_tensor_too(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        before = gpt2.transformer.h[0].output.save()
        gpt2.transformer.h[0].output[:] = 0
        after = gpt2.transformer.h[0].output.save()
    assert before is after
    assert not before.any()


def test_replacing_leaves_what_was_read_before_as_it_was(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        before = tiny.layer1.output.save()
        tiny.layer1.output = torch.zeros_like(tiny.layer1.output)
        after = tiny.layer1.output.save()
        output = tiny.output.save()
    layer1, layer2 = tiny._module.children()
    assert torch.equal(before, layer1(features))
    assert not after.any()
    assert torch.equal(output, layer2(torch.zeros(1, 10)))


def test_a_module_input_is_replaced_by_assignment(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        tiny.layer2.input = tiny.layer2.input + 1
        output = tiny.output.save()
    layer1, layer2 = tiny._module.children()
    assert torch.equal(output, layer2(layer1(features) + 1))
