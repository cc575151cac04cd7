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
    """An object with a ``save`` of its own, which shadows the one that traces give."""

    def __init__(self) -> None:
        self.saved = 0

    def save(self) -> str:
        self.saved += 1
        return "its own"


def test_a_value_that_is_not_saved_ends_with_the_trace(gpt2: LanguageModel) -> None:
    old: object = "before"
    with gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[0].output[0]
        old = gpt2.transformer.h[1].output
        assert isinstance(old, torch.Tensor)
    with pytest.raises(UnboundLocalError, match="hidden"):
        _ = hidden
    assert old == "before"  # a name keeps what it had


def test_both_ways_to_save_keep_the_value_itself(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        value = gpt2.transformer.h[0].output[0]
        by_function = nnsight_engine.save(value)
        is_same = nnsight_engine.save(by_function is value)
        by_method = gpt2.transformer.h[0].output[0].save()
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    assert is_same
    assert torch.equal(by_function, expected[0])
    assert torch.equal(by_method, expected[0])


def test_any_object_can_be_saved_either_way(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[0].output
        width = hidden.shape[-1].save()
        values = list().save()  # type: ignore[attr-defined] # noqa: C408 - as documented
        values.append(hidden)
        named = nnsight_engine.save({"norm": hidden.norm().item()})
        text = nnsight_engine.save("some text")
        nothing = nnsight_engine.save(None)
    assert width == gpt2.config.hidden_size
    assert [type(value) for value in values] == [torch.Tensor]
    assert named["norm"] > 0
    assert (text, nothing) == ("some text", None)


def test_the_set_of_saves_holds_ids_and_is_empty_afterwards(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        hidden = nnsight_engine.save(tiny.layer1.output)
        inside = nnsight_engine.save(id(hidden) in Globals.saves)
        unsaved = nnsight_engine.save(id(tiny.layer2.output) in Globals.saves)
    assert inside
    assert not unsaved
    assert len(Globals.saves) == 0


def test_the_method_exists_until_the_outermost_trace_has_ended(gpt2: LanguageModel) -> None:
    assert not hasattr(object(), "save")
    with gpt2.session():
        depth_outside = nnsight_engine.save(Globals.stack)
        with gpt2.trace("Hello"):
            depth_inside = nnsight_engine.save(Globals.stack)
            hidden = gpt2.transformer.h[0].output
        again = (hidden * 2).save()
    assert (depth_outside, depth_inside, Globals.stack) == (1, 2, 0)
    assert not hasattr(object(), "save")
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
