"""The composition of the model classes."""

from __future__ import annotations

import itertools
from pathlib import Path

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


def test_a_model_is_loaded_by_its_name(gpt2_folder: Path) -> None:
    model = LanguageModel(str(gpt2_folder))
    assert model.repo_id == str(gpt2_folder)
    assert type(model._module).__name__ == "GPT2LMHeadModel"


def test_an_existing_model_is_wrapped_with_its_tokenizer(gpt2_folder: Path) -> None:
    my_model = AutoModelForCausalLM.from_pretrained(gpt2_folder)
    tokenizer = AutoTokenizer.from_pretrained(gpt2_folder)
    model = LanguageModel(my_model, tokenizer=tokenizer)

    assert model._module is my_model
    assert model.tokenizer is tokenizer
    with model.trace("Hello"):
        logits = model.output.logits.save()
    assert torch.equal(logits, my_model(**tokens(model, "Hello")).logits)


def test_an_existing_model_without_its_tokenizer_is_an_error(gpt2_folder: Path) -> None:
    my_model = AutoModelForCausalLM.from_pretrained(gpt2_folder)
    with pytest.raises(AttributeError, match="Tokenizer not found") as caught:
        LanguageModel(my_model)
    assert "`LanguageModel(model, tokenizer=tokenizer)`" in str(caught.value)


def test_a_lazily_loaded_model_is_dispatched_by_its_first_trace(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder)
    assert model.device == torch.device("meta")
    with model.trace("Hello"):
        logits = model.output.logits.save()
    assert model.dispatched
    assert torch.equal(logits, module_of(model)(**tokens(model, "Hello")).logits)


def test_arguments_go_on_to_from_pretrained(gpt2_folder: Path) -> None:
    model = LanguageModel(
        gpt2_folder, dtype=torch.bfloat16, attn_implementation="eager", device_map="cpu", dispatch=True
    )
    assert model.transformer.wte.weight.dtype is torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert LanguageModel(gpt2_folder, torch_dtype=torch.float16, dispatch=True).lm_head.weight.dtype is (
        torch.float16
    )


def test_device_map_auto_places_the_model(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder, device_map="auto", dispatch=True)
    with model.trace("Hello"):
        hidden = model.transformer.h[0].output.save()
    assert hidden.shape == (1, 5, 128)
