"""Modules that ``torch.compile`` has made, or that lie inside one: read, or explained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nnsight_engine import NNsight
from nnsight_engine.interleaving.events import MissedProviderError


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.last = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.last(self.first(value)))


def whole() -> torch.nn.Module:
    compiled: torch.nn.Module = torch.compile(Net(), backend="eager")  # type: ignore[assignment] # a module
    return compiled


def by_method() -> torch.nn.Module:
    net = Net()
    net.compile(backend="eager")
    return net


def a_part() -> torch.nn.Module:
    net = Net()
    net.last = torch.compile(net.last, backend="eager")  # type: ignore[assignment] # a module too
    return net


@pytest.mark.parametrize(
    ("make", "inside", "outer"),
    [
        (whole, "last", "model"),
        (by_method, "first", "model"),
        (a_part, "last._orig_mod.0", "model.last"),
    ],
)
def test_a_module_inside_is_named_as_compiled_with_what_to_do(
    make: Callable[[], torch.nn.Module], inside: str, outer: str
) -> None:
    torch.compiler.reset()  # what was compiled elsewhere tells when code is run uncompiled
    module = make()
    module(torch.ones(1, 2))
    model = NNsight(module)
    place = model.get(inside)
    with (
        pytest.raises(MissedProviderError, match=rf"inside `{outer}`, which torch\.compile") as caught,
        model.trace(torch.ones(1, 2)),
    ):
        place.output.save()
    assert "NNsight(compiled._orig_mod)" in str(caught.value)
    with torch.compiler.set_stance("force_eager"), model.trace(torch.ones(1, 2)):
        value = place.output.save()
    assert value.shape == (1, 2)


@pytest.mark.parametrize(("make", "at"), [(whole, "output"), (by_method, "output"), (a_part, "last.output")])
def test_the_compiled_module_itself_is_read(make: Callable[[], torch.nn.Module], at: str) -> None:
    module = make()
    model = NNsight(module)
    with model.trace(torch.ones(1, 2)):
        value = (model.last.output if at == "last.output" else model.output).save()
    torch.testing.assert_close(value, module(torch.ones(1, 2)))


def test_a_module_that_is_not_compiled_is_not_called_so() -> None:
    model = NNsight(a_part())
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(MissedProviderError) as caught, model.trace(torch.ones(1, 2)):
        model.extra.output.save()
    assert "compile" not in str(caught.value)
