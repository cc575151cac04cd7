"""Reading and setting ``output``, ``input`` and ``inputs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight, save
from tests.guide.alone import module_of, tokens
from tests.guide.modules import TinyMLP
from tests.guide.served import Load
from tests.hook_reference import Edit, edited, outputs_of, recorded_inputs


def plain_logits(model: LanguageModel, path: str, edit: Edit) -> Any:
    """Return what the head gives when the output of the module at ``path`` is edited by a torch hook."""
    with edited(model._module, path, edit):
        (logits,) = outputs_of(model._module, tokens(model, "Hello"), "lm_head")
    return logits


def test_outputs_are_what_modules_return(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        attended = gpt2.transformer.h[0].attn.output.save()  # attention returns a tuple
        first = gpt2.transformer.h[0].attn.output[0].save()
        mlp = gpt2.transformer.h[0].mlp.output.save()
        hidden = gpt2.transformer.h[2].output.save()
        logits = gpt2.lm_head.output.save()
        whole = gpt2.output.save()
    paths = ("transformer.h.0.attn", "transformer.h.0.mlp", "transformer.h.2", "lm_head", "")
    expected = outputs_of(gpt2._module, tokens(gpt2, "Hello"), *paths)
    assert isinstance(attended, tuple)
    assert len(attended) == len(expected[0])
    assert first is attended[0]
    assert type(hidden) is torch.Tensor
    assert all(map(torch.equal, [first, mlp, hidden, logits], [expected[0][0], *expected[1:4]]))
    assert type(whole) is type(expected[4])
    assert torch.equal(whole.logits, expected[4].logits)


def test_input_is_the_first_argument_and_inputs_are_all(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        _, named = gpt2.inputs
        ids = gpt2.input.save()  # the first keyword argument, as none is positional
        is_named = save(named["input_ids"] is ids)
        given = gpt2.transformer.h[1].input.save()
        args, kwargs = gpt2.transformer.h[1].inputs
        args, kwargs = save(args), save(kwargs)
    with recorded_inputs(gpt2._module, "transformer.h.1") as plain:
        module_of(gpt2)(**tokens(gpt2, "Hello"))
    ((expected_args, expected_kwargs),) = plain
    assert is_named
    assert torch.equal(ids, tokens(gpt2, "Hello")["input_ids"])
    assert isinstance(args, tuple)
    assert isinstance(kwargs, dict)
    assert len(args) == len(expected_args)
    assert torch.equal(given, expected_args[0])
    assert torch.equal(args[0], expected_args[0])
    assert kwargs.keys() == expected_kwargs.keys()


def test_values_are_real_and_can_be_computed_with_at_once(gpt2: LanguageModel) -> None:
    noise = torch.randn(gpt2.config.hidden_size)
    with gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[0].output
        norm = save(hidden.norm().item())
        zeros = save(torch.zeros(hidden.shape))
        before = hidden.clone().save()
        hidden[:, -1, :] += noise.to(hidden.device)
        after = gpt2.transformer.h[1].input.save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert norm == expected.norm().item()
    assert zeros.shape == (1, 5, gpt2.config.hidden_size)
    assert torch.equal(before, expected)
    assert torch.equal(after[:, -1], before[:, -1] + noise)
    assert torch.equal(after[:, :-1], before[:, :-1])


def test_a_value_cannot_be_read_or_set_outside_of_a_trace(load: Load, gpt2_folder: Path) -> None:
    gpt2 = load(gpt2_folder)  # not the shared one, on which a scan may have left fake values
    message = "Cannot return output of Envoy that is not interleaving nor has a fake output set"
    with pytest.raises(ValueError, match=rf"{message}(.|\n)*with model\.trace\(input\)"):
        _ = gpt2.transformer.h[0].output
    with pytest.raises(ValueError, match="Cannot set output of Envoy that is not interleaving"):
        gpt2.transformer.h[0].output = torch.zeros(1)


def test_edits_in_place_reach_the_model(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        gpt2.transformer.h[0].output[:, -1, :] = 0
        gpt2.transformer.h[1].output[:, :, 0] = 1
        logits = gpt2.lm_head.output.save()

    def last_token_zero(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden[:, :-1], torch.zeros_like(hidden[:, -1:])], dim=1)

    def first_feature_one(hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.ones_like(hidden[..., :1]), hidden[..., 1:]], dim=2)

    with edited(gpt2._module, "transformer.h.0", last_token_zero):
        expected = plain_logits(gpt2, "transformer.h.1", first_feature_one)
    assert torch.equal(logits, expected)


def test_a_whole_output_is_replaced_by_assignment(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        before = gpt2.transformer.h[0].output.save()
        gpt2.transformer.h[0].output = gpt2.transformer.h[0].output * 0.5
        after = gpt2.transformer.h[0].output.save()
        logits = gpt2.lm_head.output.save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert torch.equal(before, expected)  # what was read before stays as it was
    assert torch.equal(after, expected * 0.5)
    assert torch.equal(logits, plain_logits(gpt2, "transformer.h.0", lambda hidden: hidden * 0.5))


def test_a_clone_made_before_an_edit_in_place_keeps_the_numbers(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        kept = gpt2.transformer.h[0].output.clone().save()
        before = gpt2.transformer.h[0].output.save()
        gpt2.transformer.h[0].output[:] = 0
        after = gpt2.transformer.h[0].output.save()
    assert torch.equal(kept, *outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0"))
    assert before is after
    assert not before.any()


def test_a_tuple_is_edited_in_place_or_replaced_as_a_whole(gpt2: LanguageModel) -> None:
    attn = gpt2.transformer.h[0].attn
    with gpt2.trace("Hello"):
        attn.output = (torch.zeros_like(attn.output[0]), *attn.output[1:])
        replaced = gpt2.lm_head.output.save()
    with gpt2.trace("Hello"):
        attn.output[0][:] = 0
        in_place = gpt2.lm_head.output.save()

    def zeroed(output: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.zeros_like(output[0]), *output[1:])

    expected = plain_logits(gpt2, "transformer.h.0.attn", zeroed)
    assert torch.equal(replaced, expected)
    assert torch.equal(in_place, expected)
    with pytest.raises(TypeError, match="does not support item assignment"), gpt2.trace("Hello"):
        attn.output[0] = torch.zeros(1)


def test_assigning_the_input_replaces_the_first_argument_alone(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        gpt2.transformer.h[1].input = gpt2.transformer.h[1].input + 1
        logits = gpt2.lm_head.output.save()
    assert torch.equal(logits, plain_logits(gpt2, "transformer.h.0", lambda hidden: hidden + 1))


def test_assigning_the_inputs_replaces_all_arguments(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        (first,), kwargs = tiny.layer2.inputs
        tiny.layer2.inputs = ((first.relu(),), kwargs)
        out = tiny.output.save()
    plain = TinyMLP()
    assert torch.equal(out, plain.layer2(plain.layer1(features).relu()))
