"""Models without weights, loaded when they are needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nnsight_engine
from nnsight_engine import LanguageModel
from nnsight_engine.modeling.mixins.loadable import LoadableMixin
from nnsight_engine.modeling.mixins.meta import MetaMixin
from tests.guide.alone import tokens
from tests.guide.modules import TinyMLP
from tests.guide.served import Load
from tests.hook_reference import outputs_of


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


asked_for: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_asked_for() -> None:
    asked_for.clear()


def test_a_loadable_model_takes_a_name_or_a_module(features: torch.Tensor) -> None:
    from_name = Hosted("somewhere", scale=2.0)
    assert asked_for == ["somewhere"]
    module = TinyMLP()
    assert Hosted(module)._module is module
    with from_name.trace(features):
        hidden = from_name.layer1.output.save()
    assert torch.equal(hidden, from_name.layer1._module(features))


def test_a_model_is_first_made_without_memory(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder)
    assert model.devices == {torch.device("meta")}
    assert not model.dispatched
    assert model.transformer.h[3].path == "model.transformer.h.3"


def test_dispatch_loads_the_weights_and_the_tree_follows(gpt2_folder: Path, plain: Load) -> None:
    model = LanguageModel(gpt2_folder)
    envoy, placeholder = model.transformer.h[0], model.transformer.h[0]._module
    model.dispatch()
    assert model.dispatched
    assert model.device == torch.device("cpu")
    assert model.transformer.h[0] is envoy
    assert envoy._module is model._module.get_submodule("transformer.h.0")
    assert envoy._module is not placeholder
    assert torch.equal(model.lm_head.weight, plain(gpt2_folder).lm_head.weight)


def test_the_first_trace_dispatches(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder)
    layer = model.transformer.h[0]
    with model.trace("Hello"):
        hidden = layer.output.save()
    assert model.dispatched
    ids = tokens(model, "Hello")
    (expected,) = outputs_of(model._module, ids, "transformer.h.0")
    assert torch.equal(hidden, expected)


def test_source_asked_for_before_is_that_of_the_loaded_module(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder)
    assert "self_c_proj_0" in str(model.transformer.h[0].attn.source)
    model.dispatch()
    with model.trace("Hello"):
        projected = model.transformer.h[0].attn.source.self_c_proj_0.output.save()
    ids = tokens(model, "Hello")
    (expected,) = outputs_of(model._module, ids, "transformer.h.0.attn.c_proj")
    assert torch.equal(projected, expected)


def test_a_scan_does_not_dispatch(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder)
    with model.scan("Hello"):
        shape = nnsight_engine.save(model.transformer.h[0].output.shape)
    assert shape == (1, 5, 128)
    assert not model.dispatched


def test_dispatch_true_loads_at_once(features: torch.Tensor) -> None:
    assert Late("now", dispatch=True).dispatched
    assert asked_for == ["now"]
    late = Late("later")
    assert asked_for == ["now"]
    assert late.device == torch.device("meta")
    with late.trace(features):
        hidden = late.layer1.output.save()
    assert asked_for == ["now", "later"]
    assert torch.equal(hidden, TinyMLP().layer1(features))


def test_a_wrapped_module_is_dispatched_already() -> None:
    assert Late(TinyMLP()).dispatched
    assert asked_for == []
