"""Options, and names that are deprecated."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight_engine.intervention.tracing.globals import Globals

import nnsight_engine
from nnsight_engine import CONFIG, NNsight
from nnsight_engine.core.config import Config
from tests.guide.modules import TinyMLP
from tests.guide.test_tracing import imported


def test_saved_options_hold_for_later_programs(tmp_path: Path) -> None:
    config = Config(tmp_path / "config.json")
    config.APP.DEBUG = True
    config.APP.CROSS_INVOKER = False
    config.save()
    later = Config(tmp_path / "config.json")
    assert later.APP.DEBUG
    assert not later.APP.CROSS_INVOKER
    assert later.APP.PYMOUNT


def test_the_options_of_the_documents_are_there_with_their_defaults() -> None:
    options = Config(Path("nowhere") / "config.json").APP
    assert not options.DEBUG
    assert options.CROSS_INVOKER
    assert options.PYMOUNT
    assert options.REMOTE_LOGGING
    assert type(CONFIG.APP) is type(options)


def test_trace_caching_is_deprecated_and_always_on() -> None:
    with pytest.warns(DeprecationWarning, match="TRACE_CACHING"):
        CONFIG.APP.TRACE_CACHING = False
    assert CONFIG.APP.TRACE_CACHING


def test_the_cache_of_traces_is_cleared_for_source_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "changing.py"
    path.write_text(
        "def run(model, x):\n    with model.trace(x):\n        v = model.layer1.output.save()\n    return v\n"
    )
    model, x = NNsight(TinyMLP()), torch.ones(1, 5)
    assert torch.equal(imported(path).run(model, x), TinyMLP().layer1(x))

    path.write_text(path.read_text().replace("layer1", "layer2"))
    Globals.cache.clear()
    assert torch.equal(imported(path).run(model, x), TinyMLP()(x))


def test_a_function_defined_in_a_loop_traces_the_wrapper_it_is_bound_to(features: torch.Tensor) -> None:
    wrappers = [NNsight(torch.nn.Linear(5, width)) for width in (2, 3)]
    late, bound = [], []
    for wrapper in wrappers:

        def late_fn() -> Any:
            with wrapper.trace(features):  # noqa: B023 - the mistake that the documents describe
                output = wrapper.output.save()  # noqa: B023
            return output

        def bound_fn(w: NNsight = wrapper) -> Any:
            with w.trace(features):
                output = w.output.save()
            return output

        late.append(late_fn)
        bound.append(bound_fn)
    assert [function().shape[1] for function in late] == [3, 3]
    assert [function().shape[1] for function in bound] == [2, 3]


@pytest.mark.parametrize(("name", "value"), [("list", []), ("dict", {}), ("int", 0), ("str", "")])
def test_nnsights_own_types_are_deprecated_for_pythons(name: str, value: object) -> None:
    with pytest.warns(DeprecationWarning, match=rf"nnsight\.{name}"):
        made = getattr(nnsight_engine, name)()
    assert made == value
    assert type(made) is type(value)


def test_apply_is_deprecated_for_a_plain_call(tiny: NNsight, features: torch.Tensor) -> None:
    with warnings.catch_warnings(record=True) as seen, tiny.trace(features):
        warnings.simplefilter("always")
        output = nnsight_engine.apply(torch.relu, tiny.output).save()  # type: ignore[attr-defined]
    assert torch.equal(output, tiny._module(features).relu())
    assert [one.category for one in seen] == [DeprecationWarning]
