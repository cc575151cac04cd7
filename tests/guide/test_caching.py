"""The values of all modules, or of some, in one go, and the traced function's result."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine import LanguageModel
from tests.guide.alone import generated, module_of, tokens
from tests.hook_reference import outputs_of, recorded, recorded_inputs


def test_a_cache_has_the_output_of_every_module_that_ran(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache()
    plain = module_of(gpt2)
    with recorded(plain, *(path for path, _ in plain.named_modules())) as outputs:
        plain(**tokens(gpt2, "Hello"))
    expected = {f"model.{path}".rstrip("."): values[0] for path, values in outputs.items() if values}
    assert set(cache) == expected.keys()
    tensors = {path: value for path, value in expected.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) > 20
    assert all(torch.equal(cache[path].output, value) for path, value in tensors.items())
    assert torch.equal(cache["model"].output.logits, expected["model"].logits)
    assert cache.model.transformer.h[0].output is cache["model.transformer.h.0"].output


def test_a_cache_holds_values_as_the_blocks_left_them(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache()
        gpt2.transformer.h[0].output[:] = 0
        gpt2.transformer.h[2].output = gpt2.transformer.h[2].output * 2
        doubled = gpt2.transformer.h[2].output.save()
    assert not cache["model.transformer.h.0"].output.any()
    assert torch.equal(cache["model.transformer.h.2"].output, doubled)


def test_a_cache_of_some_modules_with_their_inputs(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        layers = [gpt2.transformer.h[0], gpt2.transformer.h[1]]
        cache = tracer.cache(include_inputs=True, include_output=True, modules=layers)
    assert set(cache) == {"model.transformer.h.0", "model.transformer.h.1"}
    with recorded_inputs(gpt2._module, "transformer.h.1") as inputs:
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.1")
    entry = cache["model.transformer.h.1"]
    assert torch.equal(entry.output, expected)
    assert torch.equal(entry.input, inputs[0][0][0])
    args, kwargs = entry.inputs
    assert torch.equal(args[0], inputs[0][0][0])
    assert kwargs.keys() == inputs[0][1].keys()


def test_what_is_not_kept_is_named_with_the_way_to_have_it(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        inputs = tracer.cache(include_inputs=True, include_output=False, modules=[gpt2.lm_head])
        outputs = tracer.cache(include_inputs=False)
    assert inputs["model.lm_head"].input.shape == (1, 5, 128)
    with pytest.raises(AttributeError, match="include_output=True"):
        _ = inputs["model.lm_head"].output
    with pytest.raises(AttributeError, match="include_inputs=True"):
        _ = outputs["model.lm_head"].inputs


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
        converted = tracer.cache(device="cpu", dtype=torch.float16, modules=[gpt2.lm_head])
        attached = tracer.cache(detach=False, modules=[gpt2.lm_head])
    assert converted["model.lm_head"].output.dtype is torch.float16
    assert not converted["model.lm_head"].output.requires_grad
    assert attached["model.lm_head"].output.requires_grad


def test_the_result_is_what_the_model_returns(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        result = tracer.result.save()
    with gpt2.generate("Hello", max_new_tokens=5) as tracer:
        output = tracer.result.save()
    expected = module_of(gpt2)(**tokens(gpt2, "Hello"))
    assert torch.equal(result.logits, expected.logits)
    assert type(result) is type(expected)
    assert torch.equal(output, generated(gpt2, "Hello", max_new_tokens=5))
    assert gpt2.tokenizer.decode(output[0]).startswith("Hello")
