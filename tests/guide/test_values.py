"""Reading and setting ``output``, ``input`` and ``inputs``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nnsight_engine
from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import module_of, tokens
from tests.guide.modules import TinyMLP
from tests.guide.served import Load
from tests.hook_reference import edited, outputs_of, recorded_inputs


def test_output_is_what_the_module_returns(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[0].output.save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert torch.equal(hidden, expected)


def test_output_of_a_module_that_returns_a_tuple_is_the_tuple(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        output = nnsight_engine.save(gpt2.transformer.h[0].attn.output)
        first = gpt2.transformer.h[0].attn.output[0].save()
    ((expected, _),) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0.attn")
    assert isinstance(output, tuple)
    assert torch.equal(output[0], expected)
    assert first is output[0]


def test_input_is_the_first_positional_argument(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        given = gpt2.transformer.h[0].input.save()
    with recorded_inputs(gpt2._module, "transformer.h.0") as plain:
        module_of(gpt2)(**tokens(gpt2, "Hello"))
    ((args, _),) = plain
    assert torch.equal(given, args[0])


def test_input_is_the_first_keyword_argument_if_none_is_positional(gpt2: LanguageModel) -> None:
    ids = tokens(gpt2, "Hello")["input_ids"]
    with gpt2.trace("Hello"):
        given = gpt2.input.save()
    assert torch.equal(given, ids)


def test_inputs_are_all_arguments(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        args, kwargs = nnsight_engine.save(gpt2.transformer.h[0].inputs)
        args, kwargs = nnsight_engine.save(args), nnsight_engine.save(kwargs)
    with recorded_inputs(gpt2._module, "transformer.h.0") as plain:
        module_of(gpt2)(**tokens(gpt2, "Hello"))
    ((expected_args, expected_kwargs),) = plain
    assert isinstance(args, tuple)
    assert isinstance(kwargs, dict)
    assert len(args) == len(expected_args)
    assert torch.equal(args[0], expected_args[0])
    assert kwargs.keys() == expected_kwargs.keys()


def test_values_are_real_tensors_that_can_be_computed_with(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[0].output
        assert isinstance(hidden, torch.Tensor)
        norm = nnsight_engine.save(hidden.norm().item())
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert norm == expected.norm().item()


def test_a_value_cannot_be_read_outside_of_a_trace(load: Load, gpt2_folder: Path) -> None:
    gpt2 = load(gpt2_folder)  # not the shared one, on which a scan may have left fake values
    with pytest.raises(ValueError, match="Cannot return output of Envoy that is not interleaving"):
        _ = gpt2.transformer.h[0].output


def test_an_edit_in_place_reaches_the_model(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        gpt2.transformer.h[0].output[0][:] = 0
        logits = gpt2.lm_head.output.save()
    with edited(gpt2._module, "transformer.h.0", torch.zeros_like):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "lm_head")
    assert torch.equal(logits, expected)


def test_assigning_replaces_the_output(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[0].output
        gpt2.transformer.h[0].output = hidden * 0.5
        again = gpt2.transformer.h[0].output.save()
        logits = gpt2.lm_head.output.save()
    with edited(gpt2._module, "transformer.h.0", lambda value: value * 0.5):
        expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0", "lm_head")
    assert torch.equal(again, expected[0])
    assert torch.equal(logits, expected[1])


def test_assigning_the_input_replaces_the_first_argument_alone(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        gpt2.transformer.h[1].input = gpt2.transformer.h[1].input + 1
        logits = gpt2.lm_head.output.save()
    with edited(gpt2._module, "transformer.h.0", lambda value: value + 1):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "lm_head")
    assert torch.equal(logits, expected)


def test_assigning_the_inputs_replaces_all_arguments(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        (first,), kwargs = tiny.layer2.inputs
        tiny.layer2.inputs = ((first.relu(),), kwargs)
        out = tiny.output.save()
    plain = TinyMLP()
    assert torch.equal(out, plain.layer2(plain.layer1(features).relu()))


def test_a_value_cannot_be_set_outside_of_a_trace(gpt2: LanguageModel) -> None:
    with pytest.raises(ValueError, match="Cannot set output of Envoy that is not interleaving"):
        gpt2.transformer.h[0].output = torch.zeros(1)


def test_a_scan_leaves_fake_values_on_the_envoys(gpt2: LanguageModel) -> None:
    with gpt2.scan("Hello"):
        shape = nnsight_engine.save(gpt2.transformer.h[0].output[0].shape)
        unsaved = gpt2.transformer.h[1].output.shape

    assert shape == (5, 128)
    assert gpt2.transformer.h[0]._fake_output.shape == (1, 5, 128)
    (args, kwargs) = gpt2.transformer.h[0]._fake_inputs
    assert args[0].shape == (1, 5, 128)
    assert isinstance(kwargs, dict)
    # Outside of a trace, the properties give them too.
    assert gpt2.transformer.h[0].output.shape == (1, 5, 128)
    with pytest.raises(UnboundLocalError):
        _ = unsaved
