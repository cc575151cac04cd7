"""A cache that does not get what it was asked for says so, and why."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from nnsight_engine import NNsight

X = torch.ones(1, 3)


class Inner(torch.nn.Module):
    """Two layers, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Identity()
        self.second = torch.nn.Identity()
        self.unused = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(x))
        return output

    def forward_in_one_piece(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Outer(torch.nn.Module):
    """Has something before what is compiled."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.before = torch.nn.Identity()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(self.before(x))
        return output


def warned(model: NNsight, *, after: bool, **options: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(X) as tracer:
            if after:
                _ = model.second.input
            tracer.cache(**options)
    assert all(one.filename == __file__ for one in caught)
    return "\n".join(str(one.message) for one in caught)


@pytest.mark.parametrize("by_path", [True, False])
def test_a_module_that_had_run_is_named(*, by_path: bool) -> None:
    model = NNsight(Inner())
    modules = ["model.first", "model.second"] if by_path else [model.first, model.second]
    said = warned(model, after=True, modules=modules)
    assert "model.first.output, which had run before the cache was created" in said
    assert "second" not in said
    assert not warned(model, after=False, modules=modules)


def test_an_input_that_came_before_is_named_and_the_output_is_kept() -> None:
    model = NNsight(Inner())
    said = warned(model, after=True, modules=[model], include_inputs=True)
    assert "model.input, which had run before" in said
    assert "model.output" not in said


def test_a_module_that_does_not_run_is_named_if_it_was_asked_for_by_name() -> None:
    model = NNsight(Inner())
    said = warned(model, after=False, modules=[model.unused])
    assert "model.unused.output, which did not run" in said
    assert not warned(model, after=False)
    assert not warned(model, after=True)


@pytest.mark.parametrize("how", ["torch.compile", "compile", "in one piece"])
@pytest.mark.parametrize("by_name", [True, False])
def test_modules_inside_a_compiled_one_are_named(how: str, *, by_name: bool) -> None:
    inner: Any = Inner()
    if how == "torch.compile":
        inner = torch.compile(inner, backend="eager")
    elif how == "compile":
        inner.compile(backend="eager")
    else:  # as a graph without breaks
        inner._compiled_call_impl = inner.forward_in_one_piece
    inner(X)
    model = NNsight(Outer(inner))
    path = "model.inner._orig_mod.first" if how == "torch.compile" else "model.inner.first"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with model.trace(X) as tracer:
            cache = tracer.cache(modules=[path] if by_name else None)
    said = "\n".join(str(one.message) for one in caught if "tracer.cache()" in str(one.message))
    missing = path not in cache  # torch may break its graph where a trace looks
    named = f"{path}.output, which is inside model.inner" if by_name else "what is inside model.inner"
    assert missing or how != "in one piece"
    assert (named in said) == missing
    assert ("compiled by torch.compile" in said) == missing
