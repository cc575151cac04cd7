"""Sources of operations: the calls inside a function that a forward calls, known outside a trace too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight
from nnsight_engine.interleaving.events import OutOfOrderError
from tests.families.checkpoints import write_checkpoint


def halved(value: torch.Tensor) -> torch.Tensor:
    return torch.div(value, 2)


def moved(value: torch.Tensor) -> torch.Tensor:
    return torch.add(halved(value), 1)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.chosen = moved

    def helper(self, value: torch.Tensor) -> torch.Tensor:
        return moved(value)

    @decorated
    def wrapped(self, value: torch.Tensor) -> torch.Tensor:
        return halved(value)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        function = moved if value.ndim else halved
        value = self.helper(self.linear(value))
        value = self.wrapped(value)
        return self.chosen(function(value))


@pytest.fixture
def net() -> NNsight:
    return NNsight(Net())


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def attention(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    folder = write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))

    def load(implementation: str, folder: Path = folder) -> tuple[LanguageModel, Any]:
        model = LanguageModel(folder, attn_implementation=implementation)
        return model, model.layers[1].attn

    return load


def names(source: Any) -> list[str]:
    return [operation.operation.name for operation in source]


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("self_helper_0", ["moved_0"]),
        ("self_wrapped_0", ["halved_0"]),
        ("self_chosen_0", ["torch_add_0", "halved_0"]),
    ],
)
def test_what_is_spelt_out_is_listed_outside_a_trace(net: NNsight, name: str, inner: list[str]) -> None:
    source = getattr(net.source, name).source
    assert sorted(names(source)) == sorted(inner)
    assert inner[0] in repr(source)


def test_sources_nest_as_deep_as_functions_do(net: NNsight) -> None:
    deep = net.source.self_helper_0.source.moved_0.source.halved_0.source
    assert names(deep) == ["torch_div_0"]
    assert deep.torch_div_0.path == "model.self_helper_0.moved_0.halved_0.torch_div_0"
    value = torch.ones(1, 2)
    with net.trace(value):
        given = net.linear.output.save()
        halves = net.source.self_helper_0.source.moved_0.source.halved_0.source.torch_div_0.output.save()
    assert torch.equal(halves, given / 2)


def test_an_operation_deep_inside_is_written(net: NNsight) -> None:
    with net.trace(torch.ones(1, 2)):
        inside = net.source.self_helper_0.source.moved_0.source
        inside.halved_0.output = torch.full((1, 2), 6.0)
        replaced = net.source.self_helper_0.output.save()
    with net.trace(torch.ones(1, 2)):
        net.source.self_helper_0.source.moved_0.source.torch_add_0.output[:] = 3
        edited = net.source.self_helper_0.output.save()
    with net.trace(torch.ones(1, 2)):
        net.source.self_wrapped_0.source.halved_0.input = torch.full((1, 2), 8.0)
        given = net.source.self_wrapped_0.output.save()
    assert replaced.tolist() == [[7, 7]]
    assert edited.tolist() == [[3, 3]]
    assert given.tolist() == [[4, 4]]


def test_a_function_in_a_variable_is_known_once_it_has_run(net: NNsight) -> None:
    with pytest.raises(ValueError, match="inside a trace first"):
        _ = net.source.function_0.source
    with net.trace(torch.ones(1, 2)):
        net.source.function_0.source.torch_add_0.output.save()
    assert sorted(names(net.source.function_0.source)) == ["halved_0", "torch_add_0"]


@pytest.mark.parametrize("late", ["source", "inner source"])
def test_a_source_asked_for_late_counts_the_calls_before(net: NNsight, late: str) -> None:
    inputs = [torch.full((2,), float(number)) for number in range(3)]

    def run(_: int) -> None:
        for value in inputs:
            net._module(value)

    def operation() -> Any:
        return net.source.self_linear_0 if late == "source" else net.source.self_helper_0.source.moved_0

    if late == "inner source":
        _ = net.source
    with pytest.raises(OutOfOrderError, match="has passed this point"), net.trace(0, fn=run):
        net.output.sum()
        operation().output.sum()
    with net.trace(0, fn=run) as tracer:
        for _ in tracer.iter[1:]:
            value = operation().input.save()
            break
    linear = net._module.get_submodule("linear")
    assert torch.equal(value, inputs[1] if late == "source" else linear(inputs[1]))


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        ("sdpa", "torch_nn_functional_scaled_dot_product_attention_0"),
        ("eager", "torch_matmul_0"),
    ],
)
def test_an_attention_function_is_listed_read_and_written(
    attention: Callable[[str], tuple[LanguageModel, Any]], implementation: str, name: str
) -> None:
    model, attn = attention(implementation)
    source = attn.source.attention_interface_0.source
    assert name in names(source)
    assert name in repr(source)
    assert "-->" in repr(getattr(source, name))
    with model.trace("I think"):
        inner = attn.source.attention_interface_0.source
        scores = getattr(inner, name).output.save()
        plain = attn.source.attention_interface_0.output[0].save()
    with model.trace("I think"):
        inner = attn.source.attention_interface_0.source
        getattr(inner, name).output = torch.zeros_like(scores)
        changed = attn.source.attention_interface_0.output[0].save()
    assert scores.ndim == 4
    assert not torch.allclose(plain, changed)
    if implementation == "sdpa":
        assert not changed.any()
