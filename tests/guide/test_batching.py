"""Invokes with an input have rows of their own, empty ones see all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import module_of, tokens
from tests.guide.modules import TinyMLP
from tests.hook_reference import outputs_of

Prepared = tuple[tuple[Any, ...], dict[str, Any]]


class Batched(NNsight):
    """A model of one's own that can be given several inputs."""

    def _prepare_input(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        if not inputs:
            return (), kwargs, 0
        rows = torch.as_tensor(inputs[0], dtype=torch.float32).reshape(-1, 5)
        return (rows,), kwargs, len(rows)

    def _batch(self, batched_input: Prepared, *inputs: Any, **kwargs: Any) -> Prepared:
        (rows,), _ = batched_input
        return (torch.cat([rows, inputs[0]]),), kwargs


def test_input_invokes_see_their_rows_and_empty_ones_all(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            out1 = gpt2.output.logits.save()
        with tracer.invoke("World"):
            out2 = gpt2.output.logits.save()
        with tracer.invoke():
            out_all = gpt2.output.logits.save()
        with tracer.invoke():
            out_all2 = gpt2.output.logits.save()

    expected = module_of(gpt2)(**tokens(gpt2, "Hello", "World")).logits
    assert torch.equal(out1, expected[:1])
    assert torch.equal(out2, expected[1:])
    assert torch.equal(out_all, expected)
    assert torch.equal(out_all2, expected)


def test_an_empty_invoke_acts_on_the_whole_batch(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            out1 = gpt2.transformer.h[1].output.save()
        with tracer.invoke("World"):
            out2 = gpt2.transformer.h[1].output.save()
        with tracer.invoke():
            gpt2.transformer.h[0].output[:] = 0
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "transformer.h.1")
    assert not torch.equal(torch.cat([out1, out2]), expected)
    block = module_of(gpt2.transformer.h[1])
    assert torch.equal(torch.cat([out1, out2]), block(torch.zeros(2, 5, 128)))


def test_empty_invokes_break_up_the_order_of_access(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            late = gpt2.transformer.h[3].output.save()
        with tracer.invoke():
            early = gpt2.transformer.h[0].output.save()
        with tracer.invoke():
            again = gpt2.transformer.h[0].output.save()
    expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0", "transformer.h.3")
    assert torch.equal(early, expected[0])
    assert torch.equal(again, expected[0])
    assert torch.equal(late, expected[1])


def test_an_empty_invoke_needs_an_input_invoke(gpt2: LanguageModel) -> None:
    with pytest.raises(ValueError, match="there is no input"), gpt2.trace() as tracer, tracer.invoke():
        gpt2.output.save()


def test_several_inputs_need_a_model_that_can_batch(tiny: NNsight, features: torch.Tensor) -> None:
    with (
        pytest.raises(NotImplementedError, match=r"_prepare_input\(\) and _batch\(\)"),
        tiny.trace() as tracer,
    ):
        with tracer.invoke(features):
            tiny.output.save()
        with tracer.invoke(features):
            tiny.output.save()


def test_one_input_and_any_number_of_empty_invokes_need_none(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace() as tracer:
        with tracer.invoke(features):
            hidden = tiny.layer1.output.save()
        with tracer.invoke():
            again = tiny.layer1.output.save()
        with tracer.invoke():
            out = tiny.output.save()
    plain = TinyMLP()
    assert torch.equal(hidden, plain.layer1(features))
    assert torch.equal(again, hidden)
    assert torch.equal(out, plain(features))


def test_a_custom_model_batches_with_two_methods(features: torch.Tensor) -> None:
    model = Batched(TinyMLP())
    with model.trace() as tracer:
        with tracer.invoke([1.0, 2.0, 3.0, 4.0, 5.0]):
            first = model.layer1.output.save()
        with tracer.invoke(torch.cat([features, features * 2])):
            second = model.layer1.output.save()
        with tracer.invoke():
            everything = model.output.save()

    plain = TinyMLP()
    rows = torch.cat([torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]), features, features * 2])
    assert torch.equal(first, plain.layer1(rows)[:1])
    assert torch.equal(second, plain.layer1(rows)[1:])
    assert torch.equal(everything, plain(rows))


def test_texts_of_different_lengths_are_filled_up_on_the_left(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hi"):
            short = gpt2.output.logits.save()
        with tracer.invoke(" the Eiffel tower"):
            long = gpt2.output.logits.save()
        with tracer.invoke():
            ids = gpt2.input.save()
    alone = module_of(gpt2)(**tokens(gpt2, "Hi")).logits
    width = alone.shape[1]
    assert gpt2.tokenizer.padding_side == "left"
    assert ids[0, :-width].eq(gpt2.tokenizer.pad_token_id).all()
    # A row computes what it would alone, but for the order in which numbers are added.
    torch.testing.assert_close(short[:, -width:], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        long, module_of(gpt2)(**tokens(gpt2, " the Eiffel tower")).logits, rtol=1e-4, atol=1e-4
    )
