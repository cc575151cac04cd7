"""A backward pass is a trace of its own, beside which gradients come by."""

from __future__ import annotations

import pytest
import torch
from nnsight_engine.intervention.interleaver import MissedProviderError

from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import module_of, tokens
from tests.guide.modules import TinyMLP
from tests.hook_reference import gradients

LAST = "transformer.h.3"


def plain_gradients(model: LanguageModel, *paths: str) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the summed logits at what the modules at ``paths`` return."""
    return gradients(model._module, tokens(model, "Hello"), *paths)


def test_a_gradient_is_read_beside_the_backward_pass(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hs = gpt2.transformer.h[-1].output
        hs.requires_grad_(True)
        loss = gpt2.lm_head.output.sum()
        with loss.backward():
            grad = hs.grad.save()

    (expected,) = plain_gradients(gpt2, LAST)
    assert grad.shape == (1, 5, 128)
    assert torch.equal(grad, expected)


def test_a_gradient_can_be_modified_on_its_way(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        first = gpt2.transformer.h[0].output
        last = gpt2.transformer.h[-1].output
        loss = gpt2.lm_head.output.sum()
        with loss.backward():
            last.grad[:] = 0
            grad = first.grad.save()
    assert not grad.any()


def test_a_gradient_can_be_replaced(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        first = gpt2.transformer.h[0].output
        last = gpt2.transformer.h[-1].output
        loss = gpt2.lm_head.output.sum()
        with loss.backward():
            last.grad = last.grad * 2
            grad = first.grad.save()
    (expected,) = plain_gradients(gpt2, "transformer.h.0")
    torch.testing.assert_close(grad, expected * 2)


def test_gradients_come_in_the_reverse_order_of_the_forward_pass(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hs1 = gpt2.transformer.h[1].output
        hs3 = gpt2.transformer.h[3].output
        loss = gpt2.lm_head.output.sum()
        with loss.backward():
            grad3 = hs3.grad.save()
            grad1 = hs1.grad.save()
    expected = plain_gradients(gpt2, "transformer.h.1", "transformer.h.3")
    assert torch.equal(grad1, expected[0])
    assert torch.equal(grad3, expected[1])


def test_the_forward_trace_goes_on_after_the_backward_pass(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hs = gpt2.transformer.h[0].output
        with hs.sum().backward(retain_graph=True):
            grad = hs.grad.save()
        later = gpt2.transformer.h[2].output.save()
        result = gpt2.output.logits.save()
    assert torch.equal(grad, torch.ones(1, 5, 128))
    assert later.shape == (1, 5, 128)
    assert torch.equal(result, module_of(gpt2)(**tokens(gpt2, "Hello")).logits)


def test_a_module_cannot_be_asked_for_in_a_backward_block(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(ValueError, match=r"Cannot request `model\.lm_head\.output.*in a backwards tracer"),
        gpt2.trace("Hello"),
    ):
        loss = gpt2.transformer.h[0].output.sum()
        with loss.backward():
            gpt2.lm_head.output.save()


def test_gradients_asked_for_in_the_wrong_order_are_an_error(gpt2: LanguageModel) -> None:
    with pytest.raises(MissedProviderError, match=r"\d+\.grad` was not provided"), gpt2.trace("Hello"):
        hs1 = gpt2.transformer.h[1].output
        hs3 = gpt2.transformer.h[3].output
        loss = gpt2.lm_head.output.sum()
        with loss.backward():
            hs1.grad.save()
            hs3.grad.save()


def test_a_backward_pass_without_a_forward_trace() -> None:
    torch.manual_seed(0)
    some_tensor = torch.randn(3, requires_grad=True)
    hidden = some_tensor * 2
    loss = (hidden**2).sum()
    with loss.backward():
        grad = hidden.grad.save()  # type: ignore[union-attr] # waits for it
    assert torch.equal(grad, 2 * hidden)
    assert some_tensor.grad is not None  # what torch itself accumulates in leaves
    assert torch.equal(some_tensor.grad, 4 * hidden)


def test_backward_without_a_with_statement_is_torchs_own() -> None:
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_gradients_of_invokes_are_those_of_their_rows(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            hs1 = gpt2.transformer.h[-1].output
            with gpt2.lm_head.output.sum().backward(retain_graph=True):
                first = hs1.grad.save()
        with tracer.invoke("World"):
            hs2 = gpt2.transformer.h[-1].output
            with gpt2.lm_head.output.sum().backward(retain_graph=True):
                second = hs2.grad.save()
    (expected,) = plain_gradients(gpt2, LAST)
    torch.testing.assert_close(first, expected)
    assert second.shape == first.shape
    assert not torch.equal(first, second)


def test_attribution_patching_of_a_small_model(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        hidden = tiny.layer1.output
        with tiny.output[0, 0].backward():
            attribution = (hidden.grad * hidden).sum().save()
    plain = TinyMLP()
    weight = plain.layer2.weight[0]
    torch.testing.assert_close(attribution, (weight * plain.layer1(features)).sum())
