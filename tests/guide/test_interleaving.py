"""Blocks and the model take turns, invokes share a batch and variables."""

from __future__ import annotations

import pytest
import torch
from nnsight_engine.intervention.interleaver import MissedProviderError, OutOfOrderError

import nnsight_engine
from nnsight_engine import CONFIG, LanguageModel, NNsight
from tests.guide.alone import generated, tokens
from tests.guide.modules import TinyMLP
from tests.hook_reference import edited, outputs_of, recorded

# 3.1 The interleaver.


def test_a_module_gives_its_input_before_it_runs_and_its_output_after(
    tiny: NNsight, features: torch.Tensor
) -> None:
    order: list[str] = []
    tiny.layer1._module.register_forward_hook(lambda *_: order.append("forward"))

    with tiny.trace(features):
        given = nnsight_engine.save(tiny.layer1.input)
        order.append("input")
        hidden = tiny.layer1.output.save()
        order.append("output")

    assert order == ["input", "forward", "output"]
    assert torch.equal(given, features)
    assert torch.equal(hidden, TinyMLP().layer1(features))


def test_a_modified_input_and_output_are_what_the_model_goes_on_with(
    tiny: NNsight, features: torch.Tensor
) -> None:
    with tiny.trace(features):
        tiny.layer1.input = features * 2
        tiny.layer1.output = tiny.layer1.output + 1
        out = tiny.output.save()

    plain = TinyMLP()
    assert torch.equal(out, plain.layer2(plain.layer1(features * 2) + 1))


def test_wrapping_the_same_module_again_is_safe(features: torch.Tensor) -> None:
    module = TinyMLP()
    model1 = NNsight(module)
    model2 = NNsight(module)
    calls: list[int] = []
    module.layer1.register_forward_hook(lambda *_: calls.append(1))

    with model2.trace(features):
        doubled = (model2.layer1.output * 2).save()
        model2.layer1.output = doubled
        out = model2.output.save()

    assert len(calls) == 1
    assert torch.equal(doubled, TinyMLP().layer1(features) * 2)
    assert torch.equal(out, module.layer2(doubled))
    # Better than the document: the first wrapper goes on working.
    with model1.trace(features):
        hidden = model1.layer1.output.save()
    assert torch.equal(hidden, TinyMLP().layer1(features))


def test_wrapping_leaves_the_untraced_module_as_it_was(features: torch.Tensor) -> None:
    module = TinyMLP()
    before = module(features)
    forward = TinyMLP.forward
    model = NNsight(module)
    with model.trace(features):
        model.layer1.output[:] = 0
    assert torch.equal(module(features), before)
    assert type(module).forward is forward
    assert not module.layer1._forward_hooks
    assert not module.layer1._forward_pre_hooks


def test_calls_of_a_module_are_distinguished_by_number(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=3) as tracer:
        seen = nnsight_engine.save([])
        for _ in tracer.iter[:3]:
            seen.append(gpt2.transformer.h[0].output)

    with recorded(gpt2._module, "transformer.h.0") as plain:
        generated(gpt2, "Hello", max_new_tokens=3)
    assert [tuple(value.shape) for value in seen] == [(1, 5, 128), (1, 1, 128), (1, 1, 128)]
    assert all(map(torch.equal, seen, plain["transformer.h.0"]))


# 3.2 The mediator.


def test_values_asked_for_in_the_order_of_the_model_arrive(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        layer0_out = gpt2.transformer.h[0].output.save()
        layer3_out = gpt2.transformer.h[3].output.save()

    expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0", "transformer.h.3")
    assert torch.equal(layer0_out, expected[0])
    assert torch.equal(layer3_out, expected[1])


def test_a_value_asked_for_too_late_is_an_out_of_order_error(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(OutOfOrderError, match=r"Value was missed for model\.transformer\.h\.0\.output\.i0"),
        gpt2.trace("Hello"),
    ):
        gpt2.transformer.h[3].output.save()
        gpt2.transformer.h[0].output.save()


def test_an_invoke_sees_its_own_rows(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            out1 = gpt2.transformer.h[3].output.save()
        with tracer.invoke("World"):
            out2 = gpt2.transformer.h[3].output.save()

    (both,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "transformer.h.3")
    assert torch.equal(out1, both[0:1])
    assert torch.equal(out2, both[1:2])


def test_an_invoke_swaps_its_own_rows_only(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            gpt2.transformer.h[0].output = torch.zeros(1, 5, 128)
            out1 = gpt2.lm_head.output.save()
        with tracer.invoke("World"):
            out2 = gpt2.lm_head.output.save()

    def zero_first(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(hidden[:1]), hidden[1:]])

    with edited(gpt2._module, "transformer.h.0", zero_first):
        (both,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "lm_head")
    assert torch.equal(out1, both[0:1])
    assert torch.equal(out2, both[1:2])


def test_a_tensor_without_the_batch_dimension_is_seen_whole(llama: LanguageModel) -> None:
    with llama.trace() as tracer:
        with tracer.invoke("Hello"):
            cosine, _ = llama.model.rotary_emb.output
            first = cosine.save()
        with tracer.invoke("World"):
            cosine, _ = llama.model.rotary_emb.output
            second = cosine.save()
    # One table for the batch, [1, tokens, head_dim].
    assert first.shape == second.shape == (1, 5, 32)
    assert torch.equal(first, second)


def test_a_value_of_one_invoke_can_be_used_in_a_later_one_without_saving(gpt2: LanguageModel) -> None:
    # By the time the second invoke has what it waited for, the first has run.
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            embeddings = gpt2.transformer.wte.output
        with tracer.invoke("World"):
            hidden = gpt2.transformer.h[0].output
            hidden[:] = embeddings * 2
            patched = gpt2.lm_head.output.save()

    (wte,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "transformer.wte")
    with edited(gpt2._module, "transformer.h.0", lambda hidden: torch.cat([hidden[:1], wte[:1] * 2])):
        (both,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "lm_head")
    assert torch.equal(patched, both[1:2])


def test_without_a_barrier_a_value_of_the_same_module_is_not_defined(gpt2: LanguageModel) -> None:
    with pytest.raises(NameError, match="paris_embeddings"), gpt2.trace() as tracer:
        with tracer.invoke("Paris"):
            paris_embeddings = gpt2.transformer.wte.output
        with tracer.invoke("_____"):
            gpt2.transformer.wte.output = paris_embeddings


def test_sharing_between_invokes_can_be_switched_off(
    gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONFIG.APP, "CROSS_INVOKER", False)
    with pytest.raises(NameError, match="embeddings"), gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            embeddings = gpt2.transformer.wte.output
        with tracer.invoke("World"):
            hidden = gpt2.transformer.h[0].output
            hidden[:] = embeddings


def test_invokes_that_share_nothing_still_give_back_what_they_save(
    gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONFIG.APP, "CROSS_INVOKER", False)
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            first = gpt2.transformer.wte.output.save()
        with tracer.invoke("World"):
            second = gpt2.transformer.wte.output.save()
    (both,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "transformer.wte")
    assert torch.equal(torch.cat([first, second]), both)


def test_a_barrier_lets_two_invokes_share_a_value_of_one_module(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        barrier = tracer.barrier(2)

        with tracer.invoke("Paris"):
            paris_embeddings = gpt2.transformer.wte.output
            barrier()

        with tracer.invoke("_____"):
            barrier()
            gpt2.transformer.wte.output = paris_embeddings
            patched_output = gpt2.lm_head.output[:, -1].save()

    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Paris", "Paris"), "lm_head")
    assert torch.equal(patched_output, expected[1:2, -1])


def test_a_barrier_that_not_all_reach_is_an_error_and_no_deadlock(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(MissedProviderError, match="a barrier for 2 participants was reached by 1 only"),
        gpt2.trace() as tracer,
    ):
        barrier = tracer.barrier(2)
        with tracer.invoke("Paris"):
            barrier()
        with tracer.invoke("_____"):
            gpt2.transformer.wte.output.save()


def test_a_mediator_ends_with_its_block_and_keeps_nothing(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        tiny.layer1.output.save()
        mediator = nnsight_engine.save(tiny.interleaver.current)
        alive = nnsight_engine.save(mediator is not None and mediator.alive)
    assert alive
    assert mediator is not None
    assert not mediator.alive
    assert not tiny.interleaving
    assert tiny.interleaver.current is None
