"""Outputs and inputs of any module, and what saving keeps."""

from __future__ import annotations

import pytest
import torch

import nnsight_engine
from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import module_of
from tests.hook_reference import outputs_of, recorded_inputs


def test_outputs_of_layer_attention_mlp_and_head(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.trace("Hello"):
        attn_out = model.transformer.h[0].attn.output[0].save()  # attention returns a tuple
        mlp_out = model.transformer.h[0].mlp.output.save()
        layer_out = model.transformer.h[2].output.save()
        logits = model.lm_head.output.save()
    paths = ("transformer.h.0.attn", "transformer.h.0.mlp", "transformer.h.2", "lm_head")
    inputs = model.tokenizer("Hello", return_tensors="pt")
    plain_attn, plain_mlp, plain_layer, plain_logits = outputs_of(model._module, inputs, *paths)
    assert torch.equal(attn_out, plain_attn[0])
    assert torch.equal(mlp_out, plain_mlp)
    assert torch.equal(layer_out, plain_layer)
    assert torch.equal(logits, plain_logits)


def test_input_is_the_first_argument_and_inputs_are_all(gpt2: LanguageModel) -> None:
    model = gpt2
    with model.trace("Hello"):
        layer_input = model.transformer.h[1].input.save()
        all_inputs = model.transformer.h[1].inputs.save()
        by_keyword = model.transformer.ln_f.input.save()
    with recorded_inputs(model._module, "transformer.h.1") as recorded:
        module_of(model)(**model.tokenizer("Hello", return_tensors="pt"))
    ((plain_args, plain_kwargs),) = recorded
    args, kwargs = all_inputs
    assert isinstance(args, tuple)
    assert isinstance(kwargs, dict)
    assert torch.equal(layer_input, plain_args[0])
    assert layer_input is args[0]
    assert len(args) == len(plain_args)
    assert kwargs.keys() == plain_kwargs.keys()
    assert by_keyword.shape == layer_input.shape


def test_input_is_the_first_keyword_argument_where_none_is_positional(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        args, kwargs = gpt2.inputs
        first = gpt2.input.save()
        by_name = kwargs["input_ids"].save()
        num_positional = nnsight_engine.save(len(args))
    assert num_positional == 0
    assert first is by_name


def test_values_that_are_not_saved_do_not_outlive_the_trace(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        lost = gpt2.transformer.h[0].output
        kept = gpt2.transformer.h[-1].output.save()
    assert kept.shape[-1] == gpt2.config.hidden_size
    with pytest.raises(NameError, match="lost"):
        lost  # noqa: B018 - reading it is the test


def test_a_value_from_before_the_trace_is_kept_when_the_block_does_not_save(gpt2: LanguageModel) -> None:
    value = "from before"
    with gpt2.trace("Hello"):
        value = gpt2.transformer.h[-1].output
        same_again = value + 0
        assert torch.equal(value, same_again)
    assert value == "from before"


def test_both_ways_to_save_keep_the_value(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        by_function = nnsight_engine.save(gpt2.transformer.h[-1].output)
        by_method = gpt2.transformer.h[-1].output.save()
    assert by_function is by_method


def test_save_keeps_numbers_lists_and_dicts(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hs = gpt2.transformer.h[0].output
        width = nnsight_engine.save(hs.shape[-1])
        norms = nnsight_engine.save([hs.norm().item()])
        named = nnsight_engine.save({"mean": hs.mean().item()})
        collected = list().save()  # type: ignore[attr-defined] # noqa: C408 - the documented form
        collected.append(hs.shape[0])
    assert width == gpt2.config.hidden_size
    assert norms[0] > 0
    assert named.keys() == {"mean"}
    assert collected == [1]


class Checkpoint:
    """Has a ``save`` of its own, which shadows the one that traces give."""

    def __init__(self) -> None:
        self.written = False

    def save(self) -> str:
        self.written = True
        return "written"


def test_the_function_save_works_where_an_object_has_its_own(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        kept = nnsight_engine.save(Checkpoint())
        result = nnsight_engine.save(Checkpoint().save())
    assert isinstance(kept, Checkpoint)
    assert not kept.written
    assert result == "written"


def test_assignments_in_a_block_can_be_annotated(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hidden: torch.Tensor = gpt2.transformer.h[0].output.save()
        later: torch.Tensor
        later = gpt2.transformer.h[1].output.save()
    assert hidden.shape == later.shape


def test_one_trace_can_save_every_layer(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hiddens = []
        for layer in gpt2.transformer.h:
            hiddens.append(layer.output.save())  # noqa: PERF401 - the documented form
    inputs = gpt2.tokenizer("Hello", return_tensors="pt")
    expected = outputs_of(gpt2._module, inputs, *(f"transformer.h.{index}" for index in range(4)))
    assert len(hiddens) == 4
    assert all(torch.equal(hidden, plain) for hidden, plain in zip(hiddens, expected, strict=True))
