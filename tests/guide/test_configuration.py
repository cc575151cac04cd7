"""Options, and how often a block is compiled."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nnsight_engine.intervention.tracing.globals import Globals

import nnsight_engine
from nnsight_engine import CONFIG, LanguageModel, NNsight
from nnsight_engine.core.config import Config
from tests.guide.alone import module_of


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


def test_without_cross_invoker_variables_stay_in_their_invoke(
    gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONFIG.APP, "CROSS_INVOKER", False)
    with pytest.raises(NameError, match="embeddings"), gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            embeddings = gpt2.transformer.wte.output
        with tracer.invoke("World"):
            gpt2.transformer.h[0].output.save()
            gpt2.transformer.h[1].output[:] = embeddings


def test_without_cross_invoker_saved_values_still_come_back(
    gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONFIG.APP, "CROSS_INVOKER", False)
    with gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            first = gpt2.lm_head.output.save()
        with tracer.invoke("World"):
            second = gpt2.lm_head.output.save()
    logits = module_of(gpt2)(**gpt2.tokenizer(["Hello", "World"], return_tensors="pt")).logits
    assert torch.equal(torch.cat([first, second]), logits)


def test_without_pymount_there_is_the_function_save(
    tiny: NNsight, features: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONFIG.APP, "PYMOUNT", False)
    with tiny.trace(features):
        output = nnsight_engine.save(tiny.output)
    assert torch.equal(output, tiny._module(features))
    with pytest.raises(AttributeError, match="save"), tiny.trace(features):
        tiny.output.save()


def test_trace_caching_is_deprecated_and_always_on() -> None:
    with pytest.warns(DeprecationWarning, match="TRACE_CACHING"):
        CONFIG.APP.TRACE_CACHING = False
    assert CONFIG.APP.TRACE_CACHING


@pytest.fixture
def compiled_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose code is compiled from now on."""
    files: list[str] = []
    real: Callable[..., Any] = builtins.compile

    def compile_and_note(source: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        files.append(str(filename))
        return real(source, filename, *args, **kwargs)

    monkeypatch.setattr(builtins, "compile", compile_and_note)
    return files


def test_a_block_in_a_loop_is_compiled_once(
    tiny: NNsight, features: torch.Tensor, compiled_files: list[str]
) -> None:
    num_compiled = []
    outputs = []
    for scale in range(3):
        with tiny.trace(features * scale):
            output = tiny.output.save()
        outputs.append(output)
        num_compiled.append(compiled_files.count(__file__))
    assert num_compiled[0] > 0
    assert num_compiled[2] == num_compiled[0]
    assert all(torch.equal(output, tiny._module(features * scale)) for scale, output in enumerate(outputs))


def test_clearing_the_cache_has_blocks_compiled_anew(
    tiny: NNsight, features: torch.Tensor, compiled_files: list[str]
) -> None:
    counts = []
    for _ in range(2):
        Globals.cache.clear()
        compiled_files.clear()
        with tiny.trace(features):
            output = tiny.output.save()
        counts.append(compiled_files.count(__file__))
    assert counts[0] == counts[1] > 0
    assert torch.equal(output, tiny._module(features))


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
