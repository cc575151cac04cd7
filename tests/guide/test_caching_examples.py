"""The values of all modules, or of some, as the blocks leave them."""

from __future__ import annotations

import pytest
import torch

from nnsight_engine import LanguageModel
from tests.guide.alone import module_of
from tests.hook_reference import outputs_of, recorded, recorded_inputs


def test_a_cache_has_the_output_of_every_module_that_ran(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache()
    plain = module_of(gpt2)
    with recorded(plain, *(path for path, _ in plain.named_modules())) as outputs:
        plain(**gpt2.tokenizer("Hello", return_tensors="pt"))
    expected = {f"model.{path}".rstrip("."): values[0] for path, values in outputs.items() if values}
    assert set(cache) == expected.keys()
    tensors = {path: value for path, value in expected.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) > 20
    assert all(torch.equal(cache[path].output, value) for path, value in tensors.items())
    assert torch.equal(cache["model"].output.logits, expected["model"].logits)


def test_a_cache_can_be_of_some_modules(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache(
            modules=[
                gpt2.transformer.h[0],
                gpt2.transformer.h[1],
                gpt2.lm_head,
            ]
        )
    inputs = gpt2.tokenizer("Hello", return_tensors="pt")
    paths = ("transformer.h.0", "transformer.h.1", "lm_head")
    assert set(cache) == {f"model.{path}" for path in paths}
    for path, expected in zip(paths, outputs_of(gpt2._module, inputs, *paths), strict=True):
        assert torch.equal(cache[f"model.{path}"].output, expected)


def test_a_cache_can_include_inputs(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache(include_inputs=True)
    args, kwargs = cache["model.transformer.h.1"].inputs
    with recorded_inputs(gpt2._module, "transformer.h.1") as recorded:
        module_of(gpt2)(**gpt2.tokenizer("Hello", return_tensors="pt"))
    ((plain_args, plain_kwargs),) = recorded
    assert torch.equal(args[0], plain_args[0])
    assert kwargs.keys() == plain_kwargs.keys()
    assert torch.equal(cache["model.transformer.h.1"].input, plain_args[0])


def test_a_cache_without_inputs_says_so(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache(include_inputs=False)
    with pytest.raises(AttributeError, match="include_inputs=True"):
        cache["model.transformer.h.1"].inputs  # noqa: B018 - reading it is the test


def test_a_cache_has_what_interventions_made_of_the_values(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache()
        gpt2.transformer.h[0].output[:] = 0
        gpt2.transformer.h[2].output = gpt2.transformer.h[2].output * 2
        doubled = gpt2.transformer.h[2].output.save()
    assert torch.all(cache["model.transformer.h.0"].output == 0)
    assert torch.equal(cache["model.transformer.h.2"].output, doubled)


def test_a_cache_is_read_by_path_or_like_the_model(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello") as tracer:
        cache = tracer.cache()
    out1 = cache["model.transformer.h.0"].output
    out2 = cache.model.transformer.h[0].output
    assert out1 is out2
