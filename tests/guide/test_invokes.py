"""Several inputs in one forward pass, and values that go between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import module_of
from tests.hook_reference import edited, outputs_of

TOWER = " the tower is in"
CITY = " the city is in"


def swapped(rows: torch.Tensor) -> torch.Tensor:
    """Give the second of two rows what the first has."""
    return torch.stack([rows[0], rows[0]])


def test_a_value_of_one_invoke_is_used_in_another(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.trace() as tracer:
        with tracer.invoke(TOWER):
            embeddings = model.transformer.drop.output
            output1 = model.lm_head.output.save()
        with tracer.invoke(CITY):
            own = model.transformer.h[0].input  # a later place: the other invoke has its value by now
            model.transformer.h[0].input = embeddings + 0 * own
            output2 = model.lm_head.output.save()
    inputs = model.tokenizer([TOWER, CITY], return_tensors="pt")
    (untouched,) = outputs_of(model._module, inputs, "lm_head")
    with edited(model._module, "transformer.drop", swapped):
        (expected,) = outputs_of(model._module, inputs, "lm_head")
    assert not torch.equal(untouched[1], expected[1])
    assert torch.equal(output1, expected[:1])
    assert torch.equal(output2, expected[1:])


def test_an_empty_invoke_runs_on_the_combined_batch(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            pass
        with tracer.invoke("World"):
            pass
        with tracer.invoke():
            all_outputs = gpt2.lm_head.output.save()
    inputs = gpt2.tokenizer(["Hello", "World"], return_tensors="pt")
    assert all_outputs.shape[0] == 2
    assert torch.equal(all_outputs, *outputs_of(gpt2._module, inputs, "lm_head"))


def test_an_invoke_can_have_one_text_or_several(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            out1 = gpt2.lm_head.output[:, -1].save()
        with tracer.invoke(["Hello", "World"]):
            out2 = gpt2.lm_head.output[:, -1].save()
    inputs = gpt2.tokenizer(["Hello", "Hello", "World"], return_tensors="pt")
    (logits,) = outputs_of(gpt2._module, inputs, "lm_head")
    assert torch.equal(out1, logits[:1, -1])
    assert torch.equal(out2, logits[1:, -1])


def test_a_barrier_holds_an_invoke_until_another_has_its_value(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.generate(max_new_tokens=3) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(TOWER):
            embeddings = model.transformer.wte.output
            barrier()
            output1 = model.generator.output.save()
        with tracer.invoke(CITY):
            barrier()
            model.transformer.wte.output = embeddings
            output2 = model.generator.output.save()
    plain: Any = module_of(model)
    inputs = model.tokenizer([TOWER, CITY], return_tensors="pt")
    with edited(plain, "transformer.wte", swapped, calls=range(1)):  # the prompt's embeddings
        expected = plain.generate(**inputs, max_new_tokens=3)
    assert torch.equal(output1, expected[:1])
    assert torch.equal(output2, expected[1:])


def test_without_a_barrier_a_value_of_the_same_module_is_not_there_yet(gpt2: LanguageModel) -> None:
    model = gpt2
    with (
        pytest.raises(NameError, match="embeddings"),
        model.trace() as tracer,
    ):
        with tracer.invoke(TOWER):
            embeddings = model.transformer.wte.output
        with tracer.invoke(CITY):
            model.transformer.wte.output = embeddings


def test_a_barrier_shares_a_value_of_a_module_that_both_invokes_access(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(TOWER):
            clean_hs = model.transformer.h[2].output[:, -1, :]
            barrier()
        with tracer.invoke(CITY):
            barrier()
            model.transformer.h[2].output[:, -1, :] = clean_hs
            logits = model.lm_head.output.save()
    inputs = model.tokenizer([TOWER, CITY], return_tensors="pt")

    def patched(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[1, -1] = hidden[0, -1]
        return hidden

    with edited(model._module, "transformer.h.2", patched):
        (expected,) = outputs_of(model._module, inputs, "lm_head")
    assert torch.equal(logits, expected[1:])


def test_invokes_of_different_lengths_see_their_own_rows(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke(" Rome is"):
            short = gpt2.lm_head.output[:, -1].save()
        with tracer.invoke(TOWER):
            long = gpt2.lm_head.output[:, -1].save()
    for text, logits in ((" Rome is", short), (TOWER, long)):
        inputs = gpt2.tokenizer(text, return_tensors="pt")
        (alone,) = outputs_of(gpt2._module, inputs, "lm_head")
        torch.testing.assert_close(logits, alone[:, -1], rtol=1e-4, atol=5e-5)


def test_several_inputs_need_a_model_that_can_batch(tiny: NNsight, features: torch.Tensor) -> None:
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


def test_invokes_do_not_nest(gpt2: LanguageModel) -> None:
    with (
        pytest.raises(ValueError, match="Cannot invoke during an active model execution"),
        gpt2.trace() as tracer,
        tracer.invoke("Hello"),
    ):
        gpt2.transformer.h[0].output.save()
        with tracer.invoke("World"):
            pass
