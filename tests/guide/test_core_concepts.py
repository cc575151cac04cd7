"""Blocks wait for real values, invokes take turns, empty ones see all rows."""

from __future__ import annotations

import pytest
import torch
from nnsight_engine.intervention.interleaver import OutOfOrderError

from nnsight_engine import LanguageModel, NNsight, save
from tests.guide.alone import module_of
from tests.hook_reference import edited, outputs_of


def test_the_basic_pattern_saves_and_edits_activations(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.trace("input text"):
        model.transformer.h[0].output[:] = 0  # a block gives its hidden states themselves, not in a tuple
        hidden_states = model.transformer.h[-1].output.save()
    plain, inputs = module_of(model), model.tokenizer("input text", return_tensors="pt")
    (untouched,) = outputs_of(plain, inputs, "transformer.h.3")
    with edited(plain, "transformer.h.0", torch.zeros_like):
        (expected,) = outputs_of(plain, inputs, "transformer.h.3")
    assert torch.equal(hidden_states, expected)
    assert not torch.equal(hidden_states, untouched)


def test_what_is_saved_is_the_actual_tensor(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hs = gpt2.transformer.h[-1].output
        hs = hs.save()
    inputs = gpt2.tokenizer("Hello", return_tensors="pt")
    (expected,) = outputs_of(gpt2._module, inputs, "transformer.h.3")
    assert type(hs) is torch.Tensor
    assert hs.shape == (1, inputs["input_ids"].shape[1], gpt2.config.hidden_size)
    assert torch.equal(hs, expected)


def test_a_block_runs_once_and_not_where_it_stands(tiny: NNsight, features: torch.Tensor) -> None:
    events: list[str] = []
    hook = tiny._module.get_submodule("layer1").register_forward_hook(lambda *_: events.append("layer1 ran"))
    with tiny.trace(features):
        events.append("block began")
        tiny.layer1.output.save()
        events.append("block has the value")
    hook.remove()
    assert events == ["block began", "layer1 ran", "block has the value"]


def test_the_model_waits_while_the_block_uses_a_value(tiny: NNsight, features: torch.Tensor) -> None:
    events: list[str] = []
    hook = tiny._module.get_submodule("layer2").register_forward_pre_hook(
        lambda *_: events.append("layer2 begins")
    )
    with tiny.trace(features):
        hidden = tiny.layer1.output
        events.append("before layer2")
        tiny.layer2.output.save()
        events.append("after layer2")
        total = save(torch.sum(hidden))  # plain PyTorch, on the real tensor
    hook.remove()
    assert events == ["before layer2", "layer2 begins", "after layer2"]
    assert torch.equal(total, tiny._module.get_submodule("layer1")(features).sum())


def test_invokes_run_in_the_order_of_their_definition(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        order = save(list[str]())
        with tracer.invoke("Hello"):
            order.append("1 starts")
            layer_2 = gpt2.transformer.h[2].output.save()
            order.append("1 has layer 2")
            layer_3 = gpt2.transformer.h[3].output.save()
        with tracer.invoke("World"):
            order.append("2 starts")
            layer_0 = gpt2.transformer.h[0].output.save()
            order.append("2 has layer 0")
    assert order == ["1 starts", "2 starts", "2 has layer 0", "1 has layer 2"]
    inputs = gpt2.tokenizer(["Hello", "World"], return_tensors="pt")
    paths = [f"transformer.h.{index}" for index in (0, 2, 3)]
    plain_0, plain_2, plain_3 = outputs_of(gpt2._module, inputs, *paths)
    assert torch.equal(layer_0, plain_0[1:])
    assert torch.equal(layer_2, plain_2[:1])
    assert torch.equal(layer_3, plain_3[:1])


def test_a_module_that_has_run_already_is_an_error_and_no_deadlock(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(OutOfOrderError, match=r"Value was missed for model\.transformer\.h\.1\.output\.i0"),
        gpt2.trace("Hello"),
    ):
        gpt2.transformer.h[2].output.save()
        gpt2.transformer.h[1].output.save()


def test_empty_invokes_see_the_batch_of_all_inputs(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            out_1 = model.lm_head.output[:, -1].save()
        with tracer.invoke(["World", "Test"]):
            out_2 = model.lm_head.output[:, -1].save()
        with tracer.invoke():
            out_all = model.lm_head.output[:, -1].save()
        with tracer.invoke():
            out_all_2 = model.lm_head.output[:, -1].save()
    vocabulary = model.config.vocab_size
    assert (out_1.shape, out_2.shape) == ((1, vocabulary), (2, vocabulary))
    assert out_all.shape == (3, vocabulary)
    assert torch.equal(out_all, torch.cat([out_1, out_2]))
    assert torch.equal(out_all, out_all_2)


def test_empty_invokes_can_go_back_to_modules_that_another_has_passed(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            out3 = gpt2.transformer.h[3].output.save()
        with tracer.invoke():
            out1 = gpt2.transformer.h[1].output.save()
    inputs = gpt2.tokenizer("Hello", return_tensors="pt")
    plain_1, plain_3 = outputs_of(gpt2._module, inputs, "transformer.h.1", "transformer.h.3")
    assert torch.equal(out3, plain_3)
    assert torch.equal(out1, plain_1)


def test_empty_invokes_need_no_batching(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace() as tracer:
        with tracer.invoke(features):
            tiny.layer1.output[:] *= 2
        with tracer.invoke():
            output = tiny.output.save()
    layer1, layer2 = tiny._module.children()
    assert torch.equal(output, layer2(layer1(features) * 2))


def test_empty_invokes_alone_are_refused(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(ValueError, match="did not execute: there is no input"),
        gpt2.trace() as tracer,
        tracer.invoke(),
    ):
        gpt2.lm_head.output.save()


def test_an_invoke_can_hold_another_interventions_logic_on_the_same_batch(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        seen = save(list[float]())
        with tracer.invoke("Hello"):
            gpt2.transformer.h[1].output[:] = 0
        with tracer.invoke():
            seen.append(gpt2.transformer.h[1].output.abs().sum().item())
    assert seen == [0.0]
