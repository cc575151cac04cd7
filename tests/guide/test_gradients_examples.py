"""Gradients, read and edited on tensors, within a backward pass, in reverse order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nnsight_engine.intervention.interleaver import MissedProviderError

from nnsight_engine import LanguageModel, save
from tests.guide.alone import module_of, tokens
from tests.hook_reference import gradients

TEXT = "Hello"


@pytest.fixture(autouse=True)
def _no_gradients_left(gpt2: LanguageModel) -> Iterator[None]:
    """Leave the shared model's parameters as they were."""
    yield
    module_of(gpt2).zero_grad(set_to_none=True)


def plain_gradients(model: LanguageModel, *layers: int) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the summed logits at the outputs of these layers, by torch alone."""
    paths = [f"transformer.h.{layer}" for layer in layers]
    return gradients(model._module, tokens(model, TEXT), *paths)


def test_the_gradient_of_a_tensor_is_read_in_a_backward_block(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        hs = gpt2.transformer.h[-1].output
        hs.requires_grad_(True)
        logits = gpt2.lm_head.output
        loss = logits.sum()
        with loss.backward():
            grad = hs.grad.save()
    assert torch.equal(grad, *plain_gradients(gpt2, 3))


def test_a_gradient_can_be_edited_in_place(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        early = gpt2.transformer.h[0].output
        hs = gpt2.transformer.h[2].output
        logits = gpt2.lm_head.output
        with logits.sum().backward():
            hs_grad = hs.grad.clone().save()
            hs.grad[:] = 0
            early_grad = early.grad.save()
    assert torch.equal(hs_grad, *plain_gradients(gpt2, 2))
    assert not early_grad.any()  # what flows on is what the edit left


def test_a_gradient_can_be_replaced(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        early = gpt2.transformer.h[0].output
        hs = gpt2.transformer.h[2].output
        with gpt2.lm_head.output.sum().backward():
            hs.grad = hs.grad * 2
            early_grad = early.grad.save()
    assert torch.equal(early_grad, plain_gradients(gpt2, 0)[0] * 2)


def test_a_graph_that_is_retained_takes_a_second_backward_pass(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        hs = gpt2.transformer.h[-1].output
        hs.requires_grad_(True)
        logits = gpt2.lm_head.output
        with logits.sum().backward(retain_graph=True):
            grad1 = hs.grad.save()
        modified_logits = logits * 2
        with modified_logits.sum().backward():
            grad2 = hs.grad.save()
    (expected,) = plain_gradients(gpt2, 3)
    assert torch.equal(grad1, expected)
    assert torch.equal(grad2, expected * 2)


def test_a_backward_pass_can_be_traced_by_itself(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        hs = gpt2.transformer.h[-1].output
        hs.requires_grad_(True)
        hs = hs.save()
        logits = gpt2.lm_head.output.save()
    loss = logits.sum()
    with loss.backward():
        grad = hs.grad.save()
    assert torch.equal(grad, *plain_gradients(gpt2, 3))


def test_gradients_come_in_reverse_order(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        early = gpt2.transformer.h[1].output
        late = gpt2.transformer.h[3].output
        with gpt2.lm_head.output.sum().backward():
            late_grad = late.grad.save()
            early_grad = early.grad.save()
    expected_early, expected_late = plain_gradients(gpt2, 1, 3)
    assert torch.equal(late_grad, expected_late)
    assert torch.equal(early_grad, expected_early)


def test_gradients_asked_for_in_forward_order_are_an_error(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(MissedProviderError, match=r"\d+\.grad"),
        gpt2.trace(TEXT),
    ):
        early = gpt2.transformer.h[1].output
        late = gpt2.transformer.h[3].output
        with gpt2.lm_head.output.sum().backward():
            early.grad.save()
            late.grad.save()


def test_modules_cannot_be_asked_in_a_backward_block(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(ValueError, match=r"Cannot request .* in a backwards tracer"),
        gpt2.trace(TEXT),
    ):
        logits = gpt2.transformer.h[1].output
        with logits.sum().backward():
            gpt2.lm_head.output.save()


def test_the_forward_pass_goes_on_after_a_backward_block(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        hs = gpt2.transformer.h[1].output
        with (hs * 2).sum().backward(retain_graph=True):
            hs.grad.save()
        later = gpt2.lm_head.output.save()
    inputs = gpt2.tokenizer(TEXT, return_tensors="pt")
    assert torch.equal(later, module_of(gpt2)(**inputs).logits)


def test_backward_without_a_block_is_torchs_own(tiny_leaf: torch.Tensor) -> None:
    (tiny_leaf * 3).sum().backward()
    assert tiny_leaf.grad is not None
    assert torch.equal(tiny_leaf.grad, torch.full_like(tiny_leaf, 3))


@pytest.fixture
def tiny_leaf() -> torch.Tensor:
    """A tensor that keeps its gradient."""
    return torch.ones(2, requires_grad=True)


def test_gradients_are_asked_for_by_assignment_too(gpt2: LanguageModel) -> None:
    # Set it at the earliest point where gradients are needed.
    with gpt2.trace(TEXT):
        hs_1 = gpt2.transformer.h[1].output
        hs_1.requires_grad = True
        hs_3 = gpt2.transformer.h[3].output
        logits = gpt2.output.logits
        with logits.sum().backward():
            logits_grad = logits.grad.save()
            hs_3_grad = hs_3.grad.save()
            hs_1_grad = hs_1.grad.save()
    expected = plain_gradients(gpt2, 3, 1)
    assert torch.equal(logits_grad, torch.ones_like(logits_grad))
    assert torch.equal(hs_3_grad, expected[0])
    assert torch.equal(hs_1_grad, expected[1])


def test_every_kind_of_assignment_asks_for_gradients(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        start = gpt2.transformer.h[1].output
        start.requires_grad = True
        made = [start * factor for factor in range(6)]  # no leaves
        made[0].requires_grad = made[1].requires_grad = True
        (made[2].requires_grad, other) = (True, 1)
        made[3].requires_grad: bool = True  # type: ignore[misc] # Python takes it
        for made[4].requires_grad in (True,):
            other += 1
        made[5].requires_grad |= True
        flags = save([*(one.requires_grad for one in made), other])
    assert flags == [True] * 6 + [2]


def test_assignment_to_leaves_and_other_attributes_is_pythons(gpt2: LanguageModel) -> None:
    with gpt2.trace(TEXT):
        leaf = torch.ones(2)
        leaf.requires_grad = True
        cut = gpt2.transformer.h[0].output.detach()
        cut.requires_grad = False
        flags = save([leaf.requires_grad, cut.requires_grad])
    assert flags == [True, False]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        (torch.no_grad, r"gradients are switched off here\. Leave torch\.no_grad\(\)"),
        (torch.inference_mode, r"computed in inference mode\..*vLLM keeps no graph.*LanguageModel"),
    ],
)
def test_without_a_graph_the_error_says_what_is_needed(gpt2: LanguageModel, mode: Any, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason), mode():
        with gpt2.trace(TEXT):
            hs = gpt2.transformer.h[1].output
            with gpt2.lm_head.output.sum().backward():
                hs.grad.save()


def test_a_tensor_without_gradients_says_how_to_have_them(gpt2: LanguageModel) -> None:
    with pytest.raises(RuntimeError, match=r"this tensor gets no gradient.*requires_grad_\(True\)"):
        with gpt2.trace(TEXT):
            hs = gpt2.transformer.h[1].output.detach()
            with gpt2.lm_head.output.sum().backward():
                hs.grad.save()
    with pytest.raises(RuntimeError, match=r"nothing to go back through.*requires_grad_\(True\)"):
        with gpt2.trace(TEXT):
            loss = gpt2.lm_head.output.detach().sum()
            with loss.backward():
                pass


def test_what_torch_says_of_gradients_has_a_remedy(gpt2: LanguageModel) -> None:
    def freeze(value: torch.Tensor) -> None:
        value.requires_grad = True  # elsewhere than in the block

    with pytest.raises(RuntimeError, match="leaf variables") as caught, gpt2.trace(TEXT):
        freeze(gpt2.transformer.h[1].output)
    assert "requires_grad_(True)" in str(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="does not require grad") as caught, gpt2.trace(TEXT):
        gpt2.lm_head.output.detach().sum().backward()
    assert "requires_grad_(True)" in str(caught.value.__notes__)
