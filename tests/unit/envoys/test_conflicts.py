"""Modules called like something that envoys have: the module keeps the name, the envoy's moves aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.eproperty import eproperty, requires_output
from nnsight_engine.modeling.base import NNsight


class Clashing(torch.nn.Module):
    """Calls its parts ``input``, ``output`` and ``modules``, and has an inner one that does not clash."""

    def __init__(self) -> None:
        super().__init__()
        self.input = torch.nn.Linear(3, 4)
        self.inner = torch.nn.Linear(4, 4)
        self.output = torch.nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.output(self.inner(self.input(x))))


X = torch.ones(2, 3)


@pytest.fixture
def model() -> NNsight:
    with pytest.warns(
        UserWarning, match=r"Clashing has a module called `(in|out)put`.* at `\.nns_(in|out)put`"
    ):
        return NNsight(Clashing())


def test_the_module_keeps_its_name_and_the_envoys_value_is_read_under_another(model: NNsight) -> None:
    assert isinstance(model.output, Envoy)
    assert model.output._module is model._module.output
    assert not hasattr(model.inner, "nns_output")
    with model.trace(X):
        given = model.nns_input.save()
        hidden = model.input.output.save()
        result = model.nns_output.save()
    assert given is X
    assert hidden.shape == (2, 4)
    torch.testing.assert_close(result, model._module(X))


def test_the_envoys_value_is_assigned_under_another_name(model: NNsight) -> None:
    with model.trace(X) as tracer:
        model.nns_input = torch.zeros(2, 3)
        model.nns_output = model.nns_output + 1
        result = tracer.result.save()
    torch.testing.assert_close(result, model._module(torch.zeros(2, 3)) + 1)


def test_the_other_name_is_printed_and_completed(model: NNsight) -> None:
    assert "  .nns_output: output\n" in repr(model)
    assert "  (output): Linear(in_features=4, out_features=5, bias=True)" in repr(model)
    assert {"output", "nns_output", "nns_input"} <= set(dir(model))


@pytest.mark.filterwarnings("ignore:Clashing has a module called")
def test_a_custom_class_is_still_that_class() -> None:
    class Mine(Envoy):
        def doubled(self) -> Any:
            return self.nns_output * 2

    with pytest.warns(UserWarning, match="called `output`"):
        model = NNsight(torch.nn.Sequential(Clashing()), envoys={Clashing: Mine})
    assert isinstance(model[0], Mine)
    with model.trace(X):
        doubled = model[0].doubled().save()
    torch.testing.assert_close(doubled, model._module(X) * 2)


@pytest.mark.filterwarnings("ignore:Clashing has a module called")
def test_a_custom_property_moves_aside_too() -> None:
    class Mine(Envoy):
        @eproperty(key="output")
        @requires_output
        def inner(self) -> None: ...

    with pytest.warns(UserWarning, match="called `inner`"):
        model = NNsight(torch.nn.Sequential(Clashing()), envoys={Clashing: Mine})
    with model.trace(X):
        inside = model[0].inner.output.save()
        whole = model[0].nns_inner.save()
    assert (inside.shape, whole.shape) == ((2, 4), (2, 5))


@pytest.mark.parametrize("name", ["modules", "source", "skip", "trace", "device"])
def test_methods_move_aside(name: str) -> None:
    module = torch.nn.Sequential()
    module._modules[name] = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=f"called `{name}`"):
        model = NNsight(module)
    assert model.get(name)._module is module._modules[name]
    assert f"nns_{name}" in dir(model)


def test_caches_and_scans_do_not_mind_a_module_called_modules() -> None:
    module = torch.nn.Sequential()
    module._modules["modules"] = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="called `modules`"):
        model = NNsight(module)
    with model.trace(torch.ones(1, 2)) as tracer:
        cache = tracer.cache()
    assert set(cache) == {"model", "model.modules"}
    with model.scan(torch.ones(1, 2)):
        shape = model.output.shape.save()
    assert shape == (1, 2)


@pytest.mark.parametrize("name", ["path", "_module", "interleaver"])
def test_a_name_that_envoys_cannot_do_without_is_refused(name: str) -> None:
    module = torch.nn.Sequential()
    module._modules[name] = torch.nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=f"a module cannot be called '{name}': NNsight needs that name itself"
    ):
        NNsight(module)
