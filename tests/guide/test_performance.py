"""Advice that makes traces faster and must not change results, and what is cached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nnsight_engine.intervention.tracing.globals import Globals

import nnsight_engine
from nnsight_engine import CONFIG, LanguageModel, NNsight, save
from nnsight_engine.tracing.source_text import SourceReader
from tests.guide.alone import tokens
from tests.guide.modules import TinyMLP
from tests.guide.test_tracing import imported
from tests.hook_reference import edited, outputs_of, recorded

PATHS = [f"transformer.h.{layer}" for layer in range(4)]


def test_one_trace_with_many_interventions_gives_what_many_traces_give(gpt2: LanguageModel) -> None:
    one_by_one = []
    for layer in gpt2.transformer.h:
        with gpt2.trace("Hello"):
            hidden = layer.output.save()
        one_by_one.append(hidden)

    with recorded(gpt2._module, "transformer.h.0") as runs, gpt2.trace("Hello"):
        hiddens = save([])
        for layer in gpt2.transformer.h:
            hiddens.append(layer.output)

    assert len(runs["transformer.h.0"]) == 1
    assert all(map(torch.equal, hiddens, one_by_one))
    assert all(map(torch.equal, hiddens, outputs_of(gpt2._module, tokens(gpt2, "Hello"), *PATHS)))


def test_a_trace_in_a_loop_is_read_and_compiled_once(
    tiny: NNsight, features: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = SourceReader.read

    def counted(self: SourceReader, *arguments: object) -> object:
        reads.append("read")
        return read(self, *arguments)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(SourceReader, "read", counted)
    results = []
    for scale in range(5):
        with tiny.trace(features * scale):
            hidden = tiny.layer1.output.save()
        results.append(hidden)
    assert reads == ["read"]
    assert all(map(torch.equal, results, [TinyMLP().layer1(features * scale) for scale in range(5)]))


def test_traces_on_one_line_are_distinguished(tiny: NNsight, features: torch.Tensor) -> None:
    # The document's cache goes by file and line; ours by the instruction.
    # fmt: off
    for _ in range(2):
        with tiny.trace(features): a = tiny.layer1.output.save()  # noqa: E701 - one line is the point
        with tiny.trace(features), torch.no_grad(): b = tiny.layer2.output.save()  # noqa: E701
    # fmt: on
    assert torch.equal(a, TinyMLP().layer1(features))
    assert torch.equal(b, TinyMLP()(features))


def test_the_cache_is_cleared_for_source_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "changing.py"
    path.write_text(
        "def run(model, x):\n    with model.trace(x):\n        v = model.layer1.output.save()\n    return v\n"
    )
    model, x = NNsight(TinyMLP()), torch.ones(1, 5)
    assert torch.equal(imported(path).run(model, x), TinyMLP().layer1(x))

    path.write_text(path.read_text().replace("layer1", "layer2"))
    Globals.cache.clear()
    assert torch.equal(imported(path).run(model, x), TinyMLP()(x))


def test_the_option_of_trace_caching_is_deprecated(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(DeprecationWarning, match="TRACE_CACHING"):
        CONFIG.APP.TRACE_CACHING = False
    assert CONFIG.APP.TRACE_CACHING is True


def test_the_function_save_suffices(gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG.APP, "PYMOUNT", False)
    with gpt2.trace("Hello"):
        hidden = nnsight_engine.save(gpt2.transformer.h[2].output)
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.2")
    assert torch.equal(hidden, expected)


def test_an_implicit_invoke_is_the_same_as_an_explicit_one(gpt2: LanguageModel) -> None:
    with gpt2.trace() as tracer, tracer.invoke("Hello"):
        explicit = gpt2.transformer.h[2].output.save()
    with gpt2.trace("Hello"):
        implicit = gpt2.transformer.h[2].output.save()
    assert torch.equal(explicit, implicit)


def test_a_session_shares_values_between_traces(gpt2: LanguageModel) -> None:
    with gpt2.session():
        with gpt2.trace("Hello"):
            hs = gpt2.transformer.h[0].output
        with gpt2.trace("World"):
            gpt2.transformer.h[0].output = hs
            out = gpt2.output.logits.save()

    (hello,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    with edited(gpt2._module, "transformer.h.0", lambda _: hello):
        (expected,) = outputs_of(gpt2._module, tokens(gpt2, "World"), "lm_head")
    assert torch.equal(out, expected)


def test_a_session_runs_plain_code_between_its_traces(gpt2: LanguageModel) -> None:
    with gpt2.session():
        with gpt2.trace("Hello"):
            mean = gpt2.transformer.h[0].output.mean()
        branch = save("positive" if mean > 0 else "negative")
        if mean > 0:
            with gpt2.trace("World"):
                chosen = gpt2.transformer.h[1].output.save()
        else:
            with gpt2.trace("World"):
                chosen = gpt2.transformer.h[2].output.save()
    (hello,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.0")
    positive = bool(hello.mean() > 0)
    assert branch == ("positive" if positive else "negative")
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "World"), PATHS[1 if positive else 2])
    assert torch.equal(chosen, expected)
