"""Many values in one go, and the traced function's result."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine import LanguageModel
from tests.guide.alone import generated, module_of, tokens
from tests.hook_reference import outputs_of, recorded, recorded_inputs


def test_a_cache_has_every_output_by_path_and_by_attribute(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache()

    paths = ("transformer.wte", "transformer.h.0", "transformer.h.3", "transformer.ln_f", "lm_head")
    expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), *paths)
    for path, value in zip(paths, expected, strict=True):
        assert torch.equal(cache[f"model.{path}"].output, value)
    assert torch.equal(cache.model.transformer.h[0].output, expected[1])
    assert torch.equal(cache.model.transformer.h[0].output[0], expected[1][0])


def test_a_cache_holds_the_names_of_all_that_ran(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache()
    assert "model.transformer.h.0.attn" in cache
    assert set(cache.keys()) <= {path for path, _ in gpt2.named_modules()}
    assert "model.generator" not in cache


def test_a_cache_holds_values_as_the_blocks_left_them(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache()
        gpt2.transformer.h[0].output[:] = 0
    assert not cache["model.transformer.h.0"].output.any()


def test_a_cache_of_some_modules_with_their_inputs(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache(
            include_inputs=True,
            include_output=True,
            modules=[gpt2.transformer.h[0], gpt2.transformer.h[1]],
        )
    assert set(cache) == {"model.transformer.h.0", "model.transformer.h.1"}
    with recorded_inputs(gpt2._module, "transformer.h.1") as inputs:
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.1")
    entry = cache["model.transformer.h.1"]
    assert torch.equal(entry.output, expected)
    assert torch.equal(entry.input, inputs[0][0][0])
    args, kwargs = entry.inputs
    assert torch.equal(args[0], inputs[0][0][0])
    assert kwargs.keys() == inputs[0][1].keys()


def test_a_cache_without_outputs_says_how_to_have_them(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache(include_inputs=True, include_output=False, modules=[gpt2.lm_head])
    assert cache["model.lm_head"].input.shape == (1, 5, 128)
    with pytest.raises(AttributeError, match="include_output=True"):
        _ = cache["model.lm_head"].output


def test_every_invoke_has_a_cache_of_its_own(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            first = tracer.cache(modules=[gpt2.transformer.h[1]])
        with tracer.invoke("World"):
            second = tracer.cache(modules=["model.transformer.h.1"])
    (both,) = outputs_of(gpt2._module, tokens(gpt2, "Hello", "World"), "transformer.h.1")
    assert torch.equal(first["model.transformer.h.1"].output, both[:1])
    assert torch.equal(second["model.transformer.h.1"].output, both[1:])


def test_a_cache_of_generation_has_a_value_for_every_step(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=3) as tracer:
        cache = tracer.cache(modules=[gpt2.lm_head])
    with recorded(gpt2._module, "lm_head") as plain:
        generated(gpt2, "Hello", max_new_tokens=3)
    assert all(map(torch.equal, cache["model.lm_head"].output, plain["lm_head"]))


def test_a_cache_starts_where_it_is_made(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        gpt2.transformer.h[1].output.save()
        cache = tracer.cache()
    assert "model.transformer.h.0" not in cache
    assert "model.transformer.h.2" in cache


def test_cached_tensors_are_cut_off_and_may_be_converted(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache(device="cpu", dtype=torch.float16, modules=[gpt2.lm_head])
    value = cache["model.lm_head"].output
    assert value.dtype is torch.float16
    assert not value.requires_grad
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache(detach=False, modules=[gpt2.lm_head])
    assert cache["model.lm_head"].output.requires_grad


# 5.11 The result.


def test_the_result_is_what_the_model_returns(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        hidden = gpt2.transformer.h[0].output[0].save()
        result = tracer.result.save()
    expected = module_of(gpt2)(**tokens(gpt2, "Hello"))
    assert torch.equal(result.logits, expected.logits)
    assert type(result) is type(expected)
    assert hidden.shape == (5, 128)


def test_the_result_of_generation_is_its_tokens(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=5) as tracer:
        output = tracer.result.save()
    expected = generated(gpt2, "Hello", max_new_tokens=5)
    assert torch.equal(output, expected)
    assert gpt2.tokenizer.decode(output[0]).startswith("Hello")


@pytest.mark.e2e
def test_the_result_of_a_real_model_is_text(smollm: LanguageModel) -> None:
    with smollm.generate("The Eiffel Tower is located in the city of", max_new_tokens=3) as tracer:
        output = tracer.result.save()
    assert "Paris" in smollm.tokenizer.decode(output[0])
