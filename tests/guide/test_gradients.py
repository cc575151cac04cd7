"""A backward pass is a trace of its own, beside which gradients come by, in reverse order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight, save
from nnsight_engine.interleaving.events import MissedProviderError
from tests.guide.alone import module_of, tokens
from tests.hook_reference import gradients


@pytest.fixture(autouse=True)
def _no_gradients_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the shared model's parameters as they were."""
    yield
    for name in {"gpt2", "local_gpt2"} & set(request.fixturenames):
        module_of(request.getfixturevalue(name)).zero_grad(set_to_none=True)


def plain_gradients(model: LanguageModel, *layers: int) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the summed logits at the outputs of these layers, by torch alone."""
    return gradients(model._module, tokens(model, "Hello"), *(f"transformer.h.{layer}" for layer in layers))


def test_a_gradient_is_read_in_a_backward_block_and_the_forward_pass_goes_on(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hs = gpt2.transformer.h[1].output
        hs.requires_grad_(True)
        with (hs * 2).sum().backward(retain_graph=True):
            early = hs.grad.save()
        logits = gpt2.lm_head.output
        with logits.sum().backward(retain_graph=True):
            grad = hs.grad.save()
        with (logits * 2).sum().backward():
            again = hs.grad.save()
        result = gpt2.output.logits.save()
    (expected,) = plain_gradients(gpt2, 1)
    assert torch.equal(early, torch.full((1, 5, 128), 2.0))
    assert torch.equal(grad, expected)
    assert torch.equal(again, expected * 2)
    assert torch.equal(result, module_of(gpt2)(**tokens(gpt2, "Hello")).logits)


def test_a_gradient_can_be_edited_in_place_or_replaced(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        early = gpt2.transformer.h[0].output
        hs = gpt2.transformer.h[2].output
        logits = gpt2.lm_head.output
        with logits.sum().backward(retain_graph=True):
            before = hs.grad.clone().save()
            hs.grad[:] = 0
            zeroed = early.grad.save()
        with logits.sum().backward():
            hs.grad = hs.grad * 2
            doubled = early.grad.save()
    expected_early, expected = plain_gradients(gpt2, 0, 2)
    assert torch.equal(before, expected)
    assert not zeroed.any()  # what flows on is what the edit left
    assert torch.equal(doubled, expected_early * 2)


def test_gradients_come_in_the_reverse_order_of_the_forward_pass(gpt2: LanguageModel) -> None:
    # Assigned at the earliest point where gradients are needed.
    with gpt2.trace("Hello"):
        hs1 = gpt2.transformer.h[1].output
        hs1.requires_grad = True
        hs3 = gpt2.transformer.h[3].output
        logits = gpt2.output.logits
        with logits.sum().backward():
            logits_grad = logits.grad.save()
            grad3 = hs3.grad.save()
            grad1 = hs1.grad.save()
    expected = plain_gradients(gpt2, 1, 3)
    assert torch.equal(logits_grad, torch.ones_like(logits_grad))
    assert torch.equal(grad1, expected[0])
    assert torch.equal(grad3, expected[1])


def test_gradients_asked_for_in_forward_order_are_an_error_that_names_the_tensor_by_its_id(
    tiny: NNsight, features: torch.Tensor
) -> None:
    message = r"Execution complete but `\d+\.grad` was not provided"
    with pytest.raises(MissedProviderError, match=message) as caught, tiny.trace(features):
        out1 = tiny.layer1.output
        out2 = tiny.layer2.output
        identity = save(id(out2))
        with tiny.output.sum().backward():
            out1.grad.save()
            out2.grad.save()
    assert f"`{identity}.grad`" in str(caught.value)


def test_a_module_cannot_be_asked_for_in_a_backward_block(gpt2: LanguageModel) -> None:
    with pytest.raises(ValueError, match="in a backwards tracer") as caught, gpt2.trace("Hello"):
        loss = gpt2.transformer.h[0].output.sum()
        with loss.backward():
            gpt2.lm_head.output.save()
    message = str(caught.value)
    assert message.startswith("Cannot request `model.lm_head.output.i0` in a backwards tracer.")
    assert "You can only request `.grad`." in message
    assert "define your Tensors before the Backwards Tracer" in message


def test_a_backward_pass_can_be_traced_by_itself(local_gpt2: LanguageModel) -> None:
    with local_gpt2.trace("Hello"):
        hs = local_gpt2.transformer.h[-1].output
        hs.requires_grad_(True)
        hs = hs.save()
        logits = local_gpt2.lm_head.output.save()
    with logits.sum().backward():
        grad = hs.grad.save()
    assert torch.equal(grad, *plain_gradients(local_gpt2, 3))


def test_a_backward_pass_without_a_forward_trace_and_one_without_a_block() -> None:
    torch.manual_seed(0)
    some_tensor = torch.randn(3, requires_grad=True)
    hidden = some_tensor * 2
    with (hidden**2).sum().backward():
        grad = hidden.grad.save()  # type: ignore[union-attr] # waits for it
    assert torch.equal(grad, 2 * hidden)
    assert some_tensor.grad is not None  # what torch itself accumulates in leaves
    assert torch.equal(some_tensor.grad, 4 * hidden)
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
    torch.testing.assert_close(first, *plain_gradients(gpt2, 3))
    assert second.shape == first.shape
    assert not torch.equal(first, second)


# Asking for gradients, and what has none.


def test_every_kind_of_assignment_asks_for_gradients(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
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
    with gpt2.trace("Hello"):
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
        with gpt2.trace("Hello"):
            hs = gpt2.transformer.h[1].output
            with gpt2.lm_head.output.sum().backward():
                hs.grad.save()


def test_a_tensor_without_gradients_says_how_to_have_them(gpt2: LanguageModel) -> None:
    with pytest.raises(RuntimeError, match=r"this tensor gets no gradient.*requires_grad_\(True\)"):
        with gpt2.trace("Hello"):
            hs = gpt2.transformer.h[1].output.detach()
            with gpt2.lm_head.output.sum().backward():
                hs.grad.save()
    with pytest.raises(RuntimeError, match=r"nothing to go back through.*requires_grad_\(True\)"):
        with gpt2.trace("Hello"):
            loss = gpt2.lm_head.output.detach().sum()
            with loss.backward():
                pass


def test_what_torch_says_of_gradients_has_a_remedy(gpt2: LanguageModel) -> None:
    def freeze(value: torch.Tensor) -> None:
        value.requires_grad = True  # elsewhere than in the block

    with pytest.raises(RuntimeError, match="leaf variables") as caught, gpt2.trace("Hello"):
        freeze(gpt2.transformer.h[1].output)
    assert "requires_grad_(True)" in str(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="does not require grad") as caught, gpt2.trace("Hello"):
        gpt2.lm_head.output.detach().sum().backward()
    assert "requires_grad_(True)" in str(caught.value.__notes__)
