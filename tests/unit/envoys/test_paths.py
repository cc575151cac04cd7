"""Paths as the library prints them, and paths below a module, in trees whose names repeat."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnsight_engine import NNsight

NAMES = st.sampled_from(["model", "emb", "blocks", "0", "1", "2"])
Tree = dict[str, Any]
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.just({}), lambda below: st.dictionaries(NAMES, below, max_size=3), max_leaves=12
)


def test_a_deep_copy_has_modules_of_its_own() -> None:
    model = NNsight(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    outer = model[0].source
    copied: Any = copy.deepcopy(model)
    part = copy.deepcopy(model[1])
    assert part.path == "model.1"
    assert part._module is not model[1]._module
    assert copied.interleaver is copied[0].interleaver is not model.interleaver
    with torch.no_grad():
        copied._module[0].weight.zero_()
        copied._module[0].bias.zero_()
        with copied.trace(torch.ones(1, 2)):
            inner = next(iter(copied[0].source)).output.save()
            zeros = copied[0].output.save()
        with model.trace(torch.ones(1, 2)):
            others = model[0].output.save()
    assert copied[0].source is not outer
    assert torch.equal(inner, zeros)
    assert zeros.tolist() == [[0.0, 0.0]]
    assert others.all()
    with model.edit(inplace=True):
        model[0].output[:] = 1
    with pytest.raises(ValueError, match="clear_edits"):
        copy.deepcopy(model)


def module_of(tree: Tree) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, below in tree.items():
        module.add_module(name, module_of(below))
    return module


def places(tree: Tree, prefix: str = "") -> list[str]:
    """Return the paths of everything below."""
    found = []
    for name, below in tree.items():
        found += [f"{prefix}{name}", *places(below, f"{prefix}{name}.")]
    return found


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_a_printed_path_finds_its_module_and_any_other_what_is_below(tree: Tree) -> None:
    module = module_of(tree)
    model = NNsight(module)
    printed = dict(model.named_modules())
    assert set(printed) == {"model", *(f"model.{path}" for path in places(tree))}
    for above in printed.values():
        for path, inner in above._module.named_modules():
            if path:
                assert above.get(f"{above.path}.{path}")._module is inner
                expected = printed[path]._module if path in printed and above is model else inner
                if above is model or not f"{path}.".startswith(f"{above.path}."):
                    assert above.get(path)._module is expected
        assert above.get(str(above.path)) is above


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(4, 2)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.emb(ids)
        for block in self.blocks:
            values = block(values)
        return values


class Outer(torch.nn.Module):
    """Has a part with the root's own name, and a number where that part has modules."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.blocks = 2

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.model(ids))


@pytest.mark.parametrize("path", ["model.emb", "model.blocks.1", "model.blocks.1.0"])
def test_a_path_below_the_root_may_begin_with_the_roots_name(path: str) -> None:
    model = NNsight(Outer())
    assert model.get(path) is model.get(f"model.{path}")
    assert model.get(path).path == f"model.{path}"


def test_a_path_that_leads_nowhere_is_an_error_about_the_path_as_printed() -> None:
    model = NNsight(Outer())
    with pytest.raises(AttributeError, match=r"Outer at model has no attribute emd\. Did you mean .*emb"):
        model.get("model.emd")
    with pytest.raises(AttributeError, match=r"ModuleList at model\.model\.blocks has no attribute 7\."):
        model.get("model.model.blocks.7")


def test_numbers_are_names_before_they_are_places() -> None:
    parts = torch.nn.ModuleDict({"1": torch.nn.Linear(2, 2), "0": torch.nn.ReLU()})
    model = NNsight(torch.nn.Sequential(parts))
    for path in ("0.1", "model.0.1"):
        assert model.get(path)._module is parts["1"]


def test_a_cache_leads_on_from_every_place_to_what_is_below_it() -> None:
    model = NNsight(Outer())
    with model.trace(torch.tensor([1, 2])) as tracer:
        cache = tracer.cache()
    views = [*cache.items(), *((path, cache[path]) for path in cache)]
    for above in (cache.model, cache.model.model, cache.model.model.blocks):
        views += above.items()
    for path, view in views:
        envoy = model.get(path)
        assert torch.equal(view.output, cache[path].output)
        for name, _ in envoy._module.named_children():
            child = getattr(envoy, name) if not name.isdecimal() else envoy[int(name)]
            if child.path in cache:
                assert view[int(name) if name.isdecimal() else name] == cache[child.path]
    assert torch.equal(cache["model.model"].emb.output, cache.model.model.emb.output)
    assert "model.emb" not in cache


def test_a_cache_finds_numbered_parts_by_name() -> None:
    parts = torch.nn.ModuleDict({"1": torch.nn.Linear(2, 2), "0": torch.nn.Linear(2, 2)})

    class Apart(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.parts["0"](self.parts["1"](x)))

    model = NNsight(Apart(), rename={"parts": "pieces"})
    with model.trace(torch.ones(1, 2)) as tracer:
        cache = tracer.cache()
    for name in parts:
        assert torch.equal(cache[f"model.pieces.{name}"].output, cache[f"model.parts.{name}"].output)
