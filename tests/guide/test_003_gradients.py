"""User guide, gradients: read and edited on tensors, within a backward pass, in reverse order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel
from nnsight_engine.intervention.interleaver import MissedProviderError
from tests.guide.alone import module_of

TEXT = "Hello"


@pytest.fixture(autouse=True)
def _no_gradients_left(gpt2: LanguageModel) -> Iterator[None]:
    """Leave the shared model's parameters as they were."""
    yield
    module_of(gpt2).zero_grad(set_to_none=True)


def plain_gradients(model: LanguageModel, *layers: int) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the summed logits at the outputs of these layers, by torch alone."""
    kept: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        return (
            module_of(model)
            .get_submodule(f"transformer.h.{layer}")
            .register_forward_hook(lambda _module, _args, output: kept.update({layer: output}))
        )

    hooks = [keep(layer) for layer in layers]
    logits = module_of(model)(**model.tokenizer(TEXT, return_tensors="pt")).logits
    for hook in hooks:
        hook.remove()
    return torch.autograd.grad(logits.sum(), [kept[layer] for layer in layers])


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
