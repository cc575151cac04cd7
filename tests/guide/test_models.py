"""What is wrapped, how it is loaded, what it takes, and which of its methods open traces."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight_engine.intervention.batching import Batchable
from transformers import AutoModelForCausalLM, AutoTokenizer

from nnsight_engine import Envoy, LanguageModel, NNsight
from nnsight_engine.modeling.huggingface import HuggingFaceModel
from nnsight_engine.modeling.mixins.loadable import LoadableMixin
from nnsight_engine.modeling.mixins.meta import MetaMixin
from nnsight_engine.modeling.mixins.remoteable import RemoteableMixin
from nnsight_engine.modeling.transformers import TransformersModel
from tests.guide.alone import module_of, tokens
from tests.guide.modules import TinyMLP


def test_the_classes_build_on_each_other() -> None:
    chain = (
        LanguageModel,
        TransformersModel,
        HuggingFaceModel,
        RemoteableMixin,
        MetaMixin,
        LoadableMixin,
        NNsight,
        Envoy,
        Batchable,
    )
    assert all(issubclass(lower, upper) for lower, upper in itertools.pairwise(chain))


def test_a_client_has_no_weights(gpt2: LanguageModel, where: str) -> None:
    assert gpt2.devices == {torch.device("meta" if where == "remote" else "cpu")}


INPUTS: dict[str, Callable[[LanguageModel], Any]] = {
    "string": lambda model: "Hello",
    "list of strings": lambda model: ["Hello"],
    "token ids": lambda model: model.tokenizer("Hello")["input_ids"],
    "tensor": lambda model: torch.tensor([model.tokenizer("Hello")["input_ids"]]),
    "encoding": lambda model: model.tokenizer("Hello", return_tensors="pt"),
    "dict": lambda model: {
        "input_ids": torch.tensor([model.tokenizer("Hello")["input_ids"]]),
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
    },
}


@pytest.mark.parametrize("kind", INPUTS)
def test_an_input_may_come_in_many_forms(gpt2: LanguageModel, kind: str) -> None:
    with gpt2.trace(INPUTS[kind](gpt2)):
        logits = gpt2.output.logits.save()
    assert torch.equal(logits, module_of(gpt2)(**tokens(gpt2, "Hello")).logits)


@pytest.mark.e2e
def test_a_real_model_continues_a_text(smollm: LanguageModel) -> None:
    prompt = "The Eiffel Tower is in the city of"
    with smollm.trace(prompt):
        token = smollm.lm_head.output[0, -1].argmax(dim=-1).save()
    with smollm.generate(prompt, max_new_tokens=3) as tracer:
        output = tracer.result.save()
    assert smollm.tokenizer.decode(token) == " Paris"
    assert smollm.tokenizer.decode(output[0]).startswith(f"{prompt} Paris")


# Wrapping.


def test_a_loaded_model_is_wrapped_together_with_its_tokenizer(gpt2_folder: Path) -> None:
    own = AutoModelForCausalLM.from_pretrained(gpt2_folder)
    tokenizer = AutoTokenizer.from_pretrained(gpt2_folder)
    model = LanguageModel(own, tokenizer=tokenizer)
    assert model._module is own
    assert model.tokenizer is tokenizer
    with model.trace("Hello"):
        logits = model.output.logits.save()
    assert torch.equal(logits, own(**tokens(model, "Hello")).logits)
    with pytest.raises(AttributeError, match="Tokenizer not found") as caught:
        LanguageModel(own)
    assert "`LanguageModel(model, tokenizer=tokenizer)`" in str(caught.value)


def test_wrappers_of_one_module_are_independent_and_leave_it_as_it_was(features: torch.Tensor) -> None:
    module = TinyMLP()
    before = module(features)
    calls: list[int] = []
    module.layer1.register_forward_hook(lambda *_: calls.append(1))
    first, second = NNsight(module), NNsight(module)
    with first.edit(inplace=True):
        first.layer1.output[:] = 0
    with second.trace(features):
        untouched = second.layer1.output.save()
        second.layer1.output = untouched * 2
        output = second.output.save()
    with first.trace(features):
        zeroed = first.layer1.output.save()
    assert len(calls) == 2
    assert torch.equal(untouched, TinyMLP().layer1(features))
    assert torch.equal(output, TinyMLP().layer2(untouched * 2))
    assert not zeroed.any()
    assert torch.equal(module(features), before)
    assert type(module).forward is TinyMLP.forward
    assert not any(one._forward_pre_hooks for one in module.modules())
    assert not module.layer2._forward_hooks


# Loading, of models of one's own; ``unit/modeling`` has that of transformers' models.

asked_for: list[str] = []


class Hosted(LoadableMixin):
    """Loads a small model from a name."""

    def _load(self, name: str, scale: float = 1.0) -> torch.nn.Module:
        asked_for.append(name)
        module = TinyMLP()
        module.layer1.weight.data *= scale
        return module


class Late(MetaMixin):
    """Loads a small model late."""

    def _load(self, name: str) -> torch.nn.Module:
        asked_for.append(name)
        return TinyMLP()

    def _load_meta(self, name: str) -> torch.nn.Module:
        return TinyMLP()


def test_a_loadable_model_takes_a_name_or_a_module(features: torch.Tensor) -> None:
    asked_for.clear()
    from_name = Hosted("somewhere", scale=2.0)
    assert asked_for == ["somewhere"]
    module = TinyMLP()
    assert Hosted(module)._module is module
    with from_name.trace(features):
        hidden = from_name.layer1.output.save()
    assert torch.equal(hidden, from_name.layer1._module(features))
    assert not torch.equal(hidden, TinyMLP().layer1(features))


def test_a_late_model_is_loaded_by_its_first_trace_or_at_once(features: torch.Tensor) -> None:
    asked_for.clear()
    assert Late(TinyMLP()).dispatched
    assert asked_for == []
    assert Late("now", dispatch=True).dispatched
    assert asked_for == ["now"]
    late = Late("later")
    assert asked_for == ["now"]
    assert late.device == torch.device("meta")
    with late.trace(features):
        hidden = late.layer1.output.save()
    assert asked_for == ["now", "later"]
    assert torch.equal(hidden, TinyMLP().layer1(features))


# Methods.


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
