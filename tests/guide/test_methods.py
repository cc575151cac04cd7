"""An envoy looks like its module, and methods open traces."""

from __future__ import annotations

import torch

from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import generated


class WithMethod(torch.nn.Module):
    """A model that is also run by a method of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x)
        return hidden

    def twice(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.layer(x)) * scale
        return result


class Announced(NNsight):
    """A model class that runs a method in its own way when it is traced."""

    _module: WithMethod

    def __nnsight_twice__(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = WithMethod.twice(self._module, x, scale=scale * 10)
        return result


def test_attributes_are_the_modules_own(gpt2: LanguageModel) -> None:
    attention = gpt2.transformer.h[0].attn
    assert attention.num_heads == attention._module.num_heads == 4
    assert gpt2.config is gpt2._module.config


def test_generate_opens_a_trace_in_a_with_statement(gpt2: LanguageModel) -> None:
    with gpt2.generate("Hello", max_new_tokens=10):
        output = gpt2.generator.output.save()

    assert torch.equal(output, generated(gpt2, "Hello", max_new_tokens=10))


def test_generate_is_just_called_elsewhere(gpt2: LanguageModel) -> None:
    output = gpt2.generate("Hello", max_new_tokens=10)
    assert torch.equal(output, generated(gpt2, "Hello", max_new_tokens=10))


def test_any_method_opens_a_trace(features: torch.Tensor) -> None:
    model = NNsight(WithMethod())
    with model.twice(features, scale=2.0) as tracer:
        first = model.layer.output.save()
        model.layer.next()
        second = model.layer.output.save()
        result = tracer.result.save()

    layer = model.layer._module
    assert torch.equal(first, layer(features))
    assert torch.equal(second, layer(layer(features)))
    assert torch.equal(result, second * 2.0)
    assert torch.equal(model.twice(features), layer(layer(features)))


def test_a_model_class_may_say_how_its_method_is_traced(features: torch.Tensor) -> None:
    model = Announced(WithMethod())
    with model.twice(features, scale=2.0) as tracer:
        result = tracer.result.save()
    layer = model.layer._module
    assert torch.equal(result, layer(layer(features)) * 20.0)
    assert torch.equal(model.twice(features, scale=2.0), layer(layer(features)) * 2.0)
