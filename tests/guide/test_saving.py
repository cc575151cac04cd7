"""Values end with the trace unless they are saved."""

from __future__ import annotations

import pytest
import torch
from nnsight_engine.intervention.tracing.globals import Globals

import nnsight_engine
from nnsight_engine import CONFIG, LanguageModel, NNsight
from tests.guide.alone import tokens
from tests.hook_reference import outputs_of


class Keeper:
    """An object with a ``save`` of its own."""

    def __init__(self) -> None:
        self.saved = 0

    def save(self) -> str:
        """Do something else."""
        self.saved += 1
        return "its own"


def test_a_value_that_is_not_saved_ends_with_the_trace(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[0].output[0]
        assert isinstance(hidden, torch.Tensor)
    with pytest.raises(UnboundLocalError, match="hidden"):
        _ = hidden


def test_a_name_keeps_its_value_if_the_new_one_is_not_saved(tiny: NNsight, features: torch.Tensor) -> None:
    hidden: object = "before"
    with tiny.trace(features):
        hidden = tiny.layer1.output
    assert hidden == "before"


def test_the_function_save_keeps_a_value_and_returns_it(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        value = gpt2.transformer.h[0].output[0]
        hidden = nnsight_engine.save(value)
        same = nnsight_engine.save(hidden is value)
    assert same
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert torch.equal(hidden, expected[0])


def test_the_method_save_does_the_same(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[0].output[0].save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert torch.equal(hidden, expected[0])


def test_any_object_can_be_saved_either_way(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        width = tiny.layer1.output.shape[-1].save()
        values = list().save()  # type: ignore[attr-defined] # noqa: C408 - as documented
        values.append(tiny.layer1.output)
        named = nnsight_engine.save({"norm": tiny.layer2.output.norm().item()})
        text = nnsight_engine.save("some text")
        nothing = nnsight_engine.save(None)
    assert width == 10
    assert len(values) == 1
    assert isinstance(values[0], torch.Tensor)
    assert named["norm"] > 0
    assert text == "some text"
    assert nothing is None


def test_the_set_of_saves_holds_ids_and_is_empty_afterwards(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        hidden = nnsight_engine.save(tiny.layer1.output)
        inside = nnsight_engine.save(id(hidden) in Globals.saves)
        unsaved = nnsight_engine.save(id(tiny.layer2.output) in Globals.saves)
    assert inside
    assert not unsaved
    assert id(hidden) not in Globals.saves
    assert len(Globals.saves) == 0


def test_the_method_exists_within_traces_only(tiny: NNsight, features: torch.Tensor) -> None:
    assert not hasattr(object(), "save")
    with tiny.trace(features):
        there = nnsight_engine.save(hasattr(object(), "save"))
    assert there
    assert not hasattr(object(), "save")


def test_nested_traces_keep_the_method_until_all_have_ended(gpt2: LanguageModel) -> None:
    with gpt2.session():
        depth_outside = nnsight_engine.save(Globals.stack)
        with gpt2.trace("Hello"):
            depth_inside = nnsight_engine.save(Globals.stack)
            hidden = gpt2.transformer.h[0].output
        again = (hidden * 2).save()
    assert (depth_outside, depth_inside, Globals.stack) == (1, 2, 0)
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert torch.equal(again, expected * 2)


def test_an_object_with_a_save_of_its_own_keeps_it(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        method = Keeper()
        answer = nnsight_engine.save(method.save())
        function = nnsight_engine.save(Keeper())
    assert answer == "its own"
    assert function.saved == 0
    with pytest.raises(UnboundLocalError):  # its own save marks nothing
        _ = method


def test_the_method_can_be_switched_off(
    tiny: NNsight, features: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONFIG.APP, "PYMOUNT", False)
    with tiny.trace(features):
        hidden = nnsight_engine.save(tiny.layer1.output)
    assert torch.equal(hidden, tiny.layer1._module(features))
    with pytest.raises(AttributeError, match="save"), tiny.trace(features):
        tiny.layer1.output.save()
