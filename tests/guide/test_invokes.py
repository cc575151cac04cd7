"""Several inputs in one forward pass: rows of one's own, empty invokes, shared variables and barriers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import CONFIG, LanguageModel, NNsight, save
from nnsight_engine.interleaving.events import MissedProviderError
from tests.guide.alone import module_of, tokens
from tests.guide.modules import TinyMLP
from tests.hook_reference import edited, outputs_of
from tests.small_models import Rows

TOWER, CITY = " the tower is in", " the city is in"


def test_invokes_see_their_own_rows_and_empty_ones_all(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            first = gpt2.lm_head.output.save()
        with tracer.invoke(["World", "Tower"]):
            others = gpt2.lm_head.output.save()
        with tracer.invoke():
            whole = gpt2.lm_head.output.save()
        with tracer.invoke():
            again = gpt2.lm_head.output.save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World", "Tower"), "lm_head")
    assert torch.equal(first, expected[:1])
    assert torch.equal(others, expected[1:])
    assert torch.equal(whole, expected)
    assert torch.equal(again, expected)


def test_an_input_of_the_trace_is_an_invoke_too(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        implicit = gpt2.lm_head.output.save()
    with gpt2.trace() as tracer, tracer.invoke("Hello"):
        explicit = gpt2.lm_head.output.save()
    assert torch.equal(implicit, explicit)


def test_texts_of_different_lengths_are_filled_up_on_the_left(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hi"):
            short = gpt2.lm_head.output.save()
        with tracer.invoke(" the Eiffel tower"):
            long = gpt2.lm_head.output.save()
        with tracer.invoke():
            ids = gpt2.input.save()
    alone = module_of(gpt2)(**tokens(gpt2, "Hi")).logits
    width = alone.shape[1]
    assert ids[0, :-width].eq(gpt2.tokenizer.pad_token_id).all()
    # A row computes what it would alone, but for the order in which numbers are added.
    torch.testing.assert_close(short[:, -width:], alone, rtol=1e-4, atol=1e-4)
    alone = module_of(gpt2)(**tokens(gpt2, " the Eiffel tower")).logits
    torch.testing.assert_close(long, alone, rtol=1e-4, atol=1e-4)


def test_an_invoke_writes_its_own_rows_only(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            gpt2.transformer.h[0].output = torch.zeros(1, 5, 128)
            first = gpt2.lm_head.output.save()
        with tracer.invoke("World"):
            second = gpt2.lm_head.output.save()

    def first_zeroed(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(hidden[:1]), hidden[1:]])

    with edited(gpt2._module, "transformer.h.0", first_zeroed):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "lm_head")
    assert torch.equal(torch.cat([first, second]), expected)


def test_an_empty_invoke_acts_on_the_whole_batch(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            first = gpt2.transformer.h[1].output.save()
        with tracer.invoke("World"):
            second = gpt2.transformer.h[1].output.save()
        with tracer.invoke():
            gpt2.transformer.h[0].output[:] = 0
    block = module_of(gpt2.transformer.h[1])
    assert torch.equal(torch.cat([first, second]), block(torch.zeros(2, 5, 128)))


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


def test_invokes_run_in_the_order_of_their_definition_and_each_in_the_models_own(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        order = save(list[str]())
        with tracer.invoke("Hello"):
            order.append("1 starts")
            late = gpt2.transformer.h[2].output.save()
            order.append("1 has layer 2")
        with tracer.invoke("World"):
            order.append("2 starts")
            early = gpt2.transformer.h[0].output.save()
            order.append("2 has layer 0")
        with tracer.invoke():  # goes back to a layer that the first has passed
            whole = gpt2.transformer.h[0].output.save()
    assert order == ["1 starts", "2 starts", "2 has layer 0", "1 has layer 2"]
    paths = ("transformer.h.0", "transformer.h.2")
    expected = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), *paths)
    assert torch.equal(early, expected[0][1:])
    assert torch.equal(whole, expected[0])
    assert torch.equal(late, expected[1][:1])


# What a model must know, and what is refused.


def test_one_input_and_any_number_of_empty_invokes_need_no_batching(
    tiny: NNsight, features: torch.Tensor
) -> None:
    with tiny.trace() as tracer:
        with tracer.invoke(features):
            tiny.layer1.output[:] *= 2
        with tracer.invoke():
            hidden = tiny.layer1.output.save()
        with tracer.invoke():
            out = tiny.output.save()
    plain = TinyMLP()
    assert torch.equal(hidden, plain.layer1(features) * 2)
    assert torch.equal(out, plain.layer2(plain.layer1(features) * 2))
    with (
        pytest.raises(
            NotImplementedError, match=r"Batching is not implemented.*_prepare_input\(\) and _batch\(\)"
        ),
        tiny.trace() as tracer,
    ):
        with tracer.invoke(features):
            pass
        with tracer.invoke(features):
            pass


def test_a_model_of_ones_own_batches_with_two_methods(features: torch.Tensor) -> None:
    model = Rows(TinyMLP())
    with model.trace() as tracer:
        with tracer.invoke(features + 1):
            first = model.layer1.output.save()
        with tracer.invoke(torch.cat([features, features * 2])):
            second = model.layer1.output.save()
        with tracer.invoke():
            whole = model.output.save()
    plain, rows = TinyMLP(), torch.cat([features + 1, features, features * 2])
    assert torch.equal(torch.cat([first, second]), plain.layer1(rows))
    assert torch.equal(whole, plain(rows))


def test_empty_invokes_alone_are_refused(gpt2: LanguageModel) -> None:
    message = "did not execute: there is no input"
    with pytest.raises(ValueError, match=message), gpt2.trace() as tracer, tracer.invoke():
        gpt2.output.save()
    with pytest.raises(ValueError, match=r"The model did not execute.*tracer\.invoke"), gpt2.trace():
        gpt2.output.save()


def test_invokes_do_not_nest(gpt2: LanguageModel) -> None:
    message = "Cannot invoke during an active model execution / interleaving"
    with pytest.raises(ValueError, match=message), gpt2.trace() as tracer, tracer.invoke("Hello"):
        gpt2.transformer.h[0].output.save()
        with tracer.invoke("World"):
            gpt2.transformer.h[1].output.save()
    with pytest.raises(ValueError, match=message), gpt2.trace("Hello") as tracer, tracer.invoke("World"):
        gpt2.transformer.h[0].output.save()


# Variables, and barriers where both need the same place.


def test_a_value_of_one_invoke_is_used_in_a_later_one_without_saving(gpt2: LanguageModel) -> None:
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
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "lm_head")
    assert torch.equal(patched, expected[1:])


def test_without_a_barrier_a_value_of_the_same_module_is_not_defined(gpt2: LanguageModel) -> None:
    with pytest.raises(NameError, match="clean"), gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            clean = gpt2.transformer.h[1].output[0]
        with tracer.invoke("World"):
            gpt2.transformer.h[1].output[0][:] = clean


def test_sharing_can_be_switched_off(gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG.APP, "CROSS_INVOKER", False)
    with pytest.raises(NameError, match="embeddings"), gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            embeddings = gpt2.transformer.wte.output
        with tracer.invoke("World"):
            hidden = gpt2.transformer.h[0].output
            hidden[:] = embeddings
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            first = gpt2.transformer.wte.output.save()
        with tracer.invoke("World"):
            second = gpt2.transformer.wte.output.save()
    (both,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "transformer.wte")
    assert torch.equal(torch.cat([first, second]), both)


def test_a_barrier_lets_invokes_share_a_value_of_one_module(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke("Hello"):
            clean = gpt2.transformer.h[1].output[:, -1, :]
            barrier()
        with tracer.invoke("World"):
            barrier()
            gpt2.transformer.h[1].output[:, -1, :] = clean
            patched = gpt2.lm_head.output.save()

    def last_token_patched(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[1, -1] = hidden[0, -1]
        return hidden

    with edited(gpt2._module, "transformer.h.1", last_token_patched):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "lm_head")
    assert torch.equal(patched, expected[1:])


def test_a_barrier_holds_three_invokes_and_can_be_used_again(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        barrier = tracer.barrier(3)
        with tracer.invoke("Hello"):
            first = gpt2.transformer.h[0].output
            barrier()
            third = gpt2.transformer.h[2].output
            barrier()
        with tracer.invoke("World"):
            barrier()
            gpt2.transformer.h[0].output = first
            barrier()
            gpt2.transformer.h[2].output = third
            second_logits = gpt2.lm_head.output.save()
        with tracer.invoke("Tower"):
            barrier()
            barrier()
            gpt2.transformer.h[2].output = third * 2
            third_logits = gpt2.lm_head.output.save()

    def rows(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:1], hidden[:1], hidden[:1] * 2])

    with edited(gpt2._module, "transformer.h.2", rows):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World", "Tower"), "lm_head")
    assert torch.equal(torch.cat([second_logits, third_logits]), expected[1:])


def test_a_barrier_holds_in_generation(gpt2: LanguageModel) -> None:
    with gpt2.generate(max_new_tokens=3) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(TOWER):
            embeddings = gpt2.transformer.wte.output
            barrier()
            first = gpt2.generator.output.save()
        with tracer.invoke(CITY):
            barrier()
            gpt2.transformer.wte.output = embeddings
            second = gpt2.generator.output.save()

    def swapped(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([rows[0], rows[0]])

    plain: Any = module_of(gpt2)
    with edited(plain, "transformer.wte", swapped, calls=range(1)):  # the prompt's embeddings
        expected = plain.generate(**tokens(gpt2, TOWER, CITY), max_new_tokens=3)
    assert torch.equal(torch.cat([first, second]), expected)


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
