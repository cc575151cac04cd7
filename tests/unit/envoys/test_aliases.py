"""``rename=``: every form that is documented, and what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from nnsight_engine.modeling.base import NNsight
from tests.small_models import tiny_gpt2, tiny_llama

TOKENS = torch.tensor([[1, 2, 3]])


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    return tiny_gpt2()


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.mark.parametrize(
    "rename",
    [
        {"transformer.h": "layers"},
        {".transformer.h": ".layers"},
        {"transformer.h": ".layers"},
        {".transformer.h": "layers"},
        {"transformer.h": ["layers"]},
        {"transformer.h": ("layers",)},
        {".transformer": ["model", "backbone"], "model.h": "layers"},
        {"h": "blocks", "transformer.blocks": "layers"},
        {"model.transformer.h": "layers"},
        {".model.transformer.h": ".layers"},
    ],
)
def test_deep_module_is_mounted_at_the_root(gpt2: GPT2LMHeadModel, rename: dict[str, Any]) -> None:
    model = NNsight(gpt2, rename=rename)
    assert model.layers is model.transformer.h
    assert model.layers[0] is model.transformer.h[0]
    assert not hasattr(model.transformer, "layers")


def test_simple_name_applies_to_every_module_of_that_name(gpt2: GPT2LMHeadModel) -> None:
    model = NNsight(gpt2, rename={"attn": "self_attn", "lm_head": "unembed"})
    assert all(block.self_attn is block.attn for block in model.transformer.h)
    assert model.unembed is model.lm_head


@pytest.mark.parametrize("name", ["h", ".h"])
@pytest.mark.parametrize("alias", ["layers", ".layers"])
def test_a_leading_dot_stands_for_the_module_where_the_path_starts(
    gpt2: GPT2LMHeadModel, name: str, alias: str
) -> None:
    model = NNsight(gpt2, rename={name: alias, ".mlp.c_proj": "down"})
    assert model.transformer.layers is model.transformer.h
    assert model.transformer.layers[1].down is model.transformer.h[1].mlp.c_proj
    assert "layers" in dir(model.transformer)
    assert "h/layers" in repr(model)


@pytest.mark.parametrize("name", ["model", ".model"])
def test_the_root_itself_can_be_named(gpt2: GPT2LMHeadModel, name: str) -> None:
    model = NNsight(gpt2, rename={name: ["whole", "lm"], "transformer": "body"})
    assert model.whole is model.lm is model
    assert model.lm.body is model.transformer
    with model.trace(TOKENS):
        head = model.lm_head.output.save()
        logits = model.lm.output.logits.save()
    assert torch.equal(logits, head)


def test_a_module_called_like_the_root_is_meant_before_it(llama: LlamaForCausalLM) -> None:
    model = NNsight(llama, rename={"model": "body", "model.layers": "blocks"})
    assert model.body is model.model
    assert model.body.layers is model.blocks is model.model.layers


def test_a_table_that_names_another_architectures_model_is_no_clash(gpt2: GPT2LMHeadModel) -> None:
    model = NNsight(gpt2, rename={"transformer": "body", "model": "body"})
    assert model.body is model.transformer


def test_numbered_module_can_be_named() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), rename={"1": "last"})
    assert model.last is model[1]


def test_parameter_can_be_named(gpt2: GPT2LMHeadModel) -> None:
    assert NNsight(gpt2, rename={"lm_head.weight": "unembedding"}).unembedding is gpt2.lm_head.weight


def test_paths_written_with_further_names_are_found(gpt2: GPT2LMHeadModel) -> None:
    model = NNsight(gpt2, rename={"transformer.h": "layers", "mlp": "ffn"})
    assert model.get("layers.1.ffn") is model.get("transformer.h.1.mlp") is model.transformer.h[1].mlp


@pytest.mark.parametrize(
    "rename", [{"decoder.layers": "blocks"}, {".transfomer.h": "blocks"}, {"a": "b", "b": "a"}]
)
def test_names_that_lead_nowhere_are_refused(gpt2: GPT2LMHeadModel, rename: dict[str, str]) -> None:
    path = next(iter(rename)).removeprefix(".")
    with pytest.raises(ValueError, match=f"this model has no '{path}'"):
        NNsight(gpt2, rename=rename)


def test_a_table_for_several_architectures_needs_one_path_for_each_name(gpt2: GPT2LMHeadModel) -> None:
    table = {"transformer.h": "blocks", "model.layers": "blocks", "self_attn": "attn"}
    assert len(NNsight(gpt2, rename=table).blocks) == 2
    with pytest.raises(ValueError, match="has no 'self_attn'"):
        NNsight(gpt2, rename={**table, "self_attn": "attention"})


def test_name_for_two_modules_at_once_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"the name 'it' to both '0' and '1' of model; leave one"):
        NNsight(module, rename={"0": "it", "1": "it"})


def test_name_that_envoys_have_themselves_is_refused(gpt2: GPT2LMHeadModel) -> None:
    with pytest.raises(ValueError, match="every envoy has a 'output' of its own; choose another name"):
        NNsight(gpt2, rename={"lm_head": "output"})


@pytest.mark.parametrize("rename", [{"lm_head": "a.b"}, {"": "x"}, {"lm head": "x"}, {"lm_head": ""}])
def test_what_is_no_name_is_refused(gpt2: GPT2LMHeadModel, rename: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"the key is a path such as 'transformer\.h', the value a single name"
    ):
        NNsight(gpt2, rename=rename)


@pytest.mark.parametrize("rename", [{"lm_head": None}, {"lm_head": 3}, {3: "head"}, [("lm_head", "head")]])
def test_what_is_no_mapping_of_names_is_refused(gpt2: GPT2LMHeadModel, rename: Any) -> None:
    with pytest.raises(TypeError, match="rename maps"):
        NNsight(gpt2, rename=rename)
