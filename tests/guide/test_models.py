"""Any module can be wrapped, transformers' are loaded as it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nnsight_engine import LanguageModel, NNsight
from tests.hook_reference import outputs_of


def test_any_module_can_be_wrapped() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.Linear(10, 2))
    model = NNsight(net)
    row = torch.rand(1, 5)
    with model.trace(row):
        output = model.output.save()
    assert torch.equal(output, net(row))


def test_a_language_model_tokenizes_text_itself(gpt2: LanguageModel) -> None:
    with gpt2.trace("The Eiffel Tower is in"):
        input_ids = gpt2.inputs[1]["input_ids"].save()
        hidden_states = gpt2.transformer.h[-1].output.save()
    inputs = gpt2.tokenizer("The Eiffel Tower is in", return_tensors="pt")
    assert torch.equal(input_ids, inputs["input_ids"])
    assert torch.equal(hidden_states, *outputs_of(gpt2._module, inputs, "transformer.h.3"))


def test_the_wrapped_model_is_the_one_from_transformers(gpt2: LanguageModel, gpt2_folder: Path) -> None:
    own = AutoModelForCausalLM.from_pretrained(gpt2_folder)
    assert type(gpt2._module) is type(own)
    for (name, loaded), (own_name, expected) in zip(
        gpt2._module.named_parameters(), own.named_parameters(), strict=True
    ):
        assert name == own_name
        assert torch.equal(loaded, expected)
    tokenizer = AutoTokenizer.from_pretrained(gpt2_folder)
    assert gpt2.tokenizer("Hello")["input_ids"] == tokenizer("Hello")["input_ids"]


def test_keyword_arguments_go_on_to_from_pretrained(llama_folder: Path) -> None:
    model = LanguageModel(
        llama_folder,
        device_map="cpu",
        torch_dtype=torch.float16,
        trust_remote_code=True,
        attn_implementation="eager",
        dispatch=True,
    )
    assert {parameter.dtype for parameter in model._module.parameters()} == {torch.float16}
    assert model.config._attn_implementation == "eager"
    assert model.device == torch.device("cpu")


def test_weights_are_loaded_by_the_first_run_unless_dispatch_says_now(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder)
    assert model.device == torch.device("meta")
    with model.trace("Hello"):
        logits = model.lm_head.output.save()
    assert model.device == torch.device("cpu")
    inputs = model.tokenizer("Hello", return_tensors="pt")
    assert torch.equal(logits, AutoModelForCausalLM.from_pretrained(gpt2_folder)(**inputs).logits)
    assert LanguageModel(gpt2_folder, dispatch=True).device == torch.device("cpu")


def test_a_loaded_model_is_wrapped_together_with_its_tokenizer(gpt2_folder: Path) -> None:
    hf_model = AutoModelForCausalLM.from_pretrained(gpt2_folder)
    tokenizer = AutoTokenizer.from_pretrained(gpt2_folder)
    model = LanguageModel(hf_model, tokenizer=tokenizer)
    with model.trace("Hello"):
        logits = model.lm_head.output.save()
    assert model._module is hf_model
    assert torch.equal(logits, hf_model(**tokenizer("Hello", return_tensors="pt")).logits)


def test_a_loaded_model_without_its_tokenizer_is_refused(gpt2: LanguageModel) -> None:
    with pytest.raises(AttributeError, match=r"Tokenizer not found\. If you passed a pre-loaded model to"):
        LanguageModel(gpt2._module)


def test_wrapping_a_module_twice_does_not_stack_hooks(tiny: NNsight, features: torch.Tensor) -> None:
    net = tiny._module
    layer1, layer2 = net.children()
    model1, model2 = NNsight(net), NNsight(net)
    calls: list[str] = []
    for model in (model1, model2, model1):
        with model.trace(features):
            model.layer1.output[:] += 1
            calls.append("edited")
            output = model.output.save()
        assert torch.equal(output, layer2(layer1(features) + 1))
    assert len(calls) == 3
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_wrappers_of_one_module_are_independent(tiny: NNsight, features: torch.Tensor) -> None:
    model1, model2 = NNsight(tiny._module), NNsight(tiny._module)
    with model1.edit(inplace=True):
        model1.layer1.output[:] = 0
    with model2.trace(features):
        untouched = model2.layer1.output.save()
    with model1.trace(features):
        zeroed = model1.layer1.output.save()
    assert torch.equal(untouched, tiny._module.get_submodule("layer1")(features))
    assert not zeroed.any()
