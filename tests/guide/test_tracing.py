"""A block is captured, parsed, compiled, and run beside the model; see also ``unit/tracing``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import torch
from nnsight_engine.intervention.backends.base import Backend
from nnsight_engine.intervention.tracing.base import Info, Tracer, WithBlockNotFoundError

from nnsight_engine import LanguageModel, NNsight, save
from tests.guide.alone import tokens
from tests.guide.modules import TinyMLP
from tests.hook_reference import outputs_of


def imported(path: Path) -> ModuleType:
    """Import a file that is no part of the project."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_block_and_the_model_take_turns(tiny: NNsight, features: torch.Tensor) -> None:
    order: list[str] = []
    tiny.layer1._module.register_forward_hook(lambda *_: order.append("layer1 runs"))
    tiny.layer2._module.register_forward_pre_hook(lambda *_: order.append("layer2 begins"))
    with tiny.trace(features):
        order.append("the block begins")
        given = tiny.layer1.input.save()
        order.append("the block has the input")
        hidden = tiny.layer1.output.save()
        order.append("the block has the output")  # for which the model waits
        tiny.layer2.output.save()
        order.append("the block ends")
    assert order == [
        "the block begins",
        "the block has the input",
        "layer1 runs",
        "the block has the output",
        "layer2 begins",
        "the block ends",
    ]
    assert torch.equal(given, features)
    assert torch.equal(hidden, TinyMLP().layer1(features))


def test_a_mediator_ends_with_its_block_and_keeps_nothing(tiny: NNsight, features: torch.Tensor) -> None:
    with tiny.trace(features):
        tiny.layer1.output.save()
        mediator = save(tiny.interleaver.current)
        alive = save(mediator is not None and mediator.alive)
    assert alive
    assert mediator is not None
    assert not mediator.alive
    assert not tiny.interleaving
    assert tiny.interleaver.current is None


# Capture.


def test_source_is_what_it_was_when_the_file_was_first_read(tmp_path: Path) -> None:
    before = """\
def first(model, x):
    with model.trace(x):
        value = model.layer1.output.save()
    return value

def second(model, x):
    with model.trace(x):
        value = (model.layer1.output * 2).save()
    return value
"""
    path = tmp_path / "edited_later.py"
    path.write_text(before)
    module = imported(path)
    model, x = NNsight(TinyMLP()), torch.ones(1, 5)
    expected = TinyMLP().layer1(x)
    assert torch.equal(module.first(model, x), expected)
    path.write_text("# a line more\n# and another\n" + before.replace("* 2", "* 3"))
    assert torch.equal(module.second(model, x), expected * 2)


def test_indentation_of_the_surroundings_is_removed(tiny: NNsight, features: torch.Tensor) -> None:
    if True:
        for _ in range(1):
            with tiny.trace(features):
                hidden = tiny.layer1.output.save()
                text = save(
                    """
    indented text stays as it is
"""
                )
    assert torch.equal(hidden, TinyMLP().layer1(features))
    assert text == "\n    indented text stays as it is\n"


def test_traces_on_one_line_are_distinguished(tiny: NNsight, features: torch.Tensor) -> None:
    # The document's cache goes by file and line; ours by the instruction.
    # fmt: off
    for _ in range(2):
        with tiny.trace(features): a = tiny.layer1.output.save()  # noqa: E701 - one line is the point
        with tiny.trace(features), torch.no_grad(): b = tiny.layer2.output.save()  # noqa: E701
    # fmt: on
    assert torch.equal(a, TinyMLP().layer1(features))
    assert torch.equal(b, TinyMLP()(features))


def test_contexts_behind_a_trace_hold_for_its_block_and_those_before_it_for_the_model_too(
    gpt2: LanguageModel,
) -> None:
    with gpt2.trace("Hello world"), torch.no_grad():
        in_block = save(torch.is_grad_enabled())
        logits = gpt2.lm_head.output.save()
    with torch.no_grad(), gpt2.trace("Hello world"):
        without = gpt2.lm_head.output.save()
    assert not in_block
    assert torch.equal(logits, *outputs_of(gpt2._module, tokens(gpt2, "Hello world"), "lm_head"))
    assert not without.requires_grad


def test_a_trace_without_a_with_block_is_reported_with_its_line(gpt2: LanguageModel) -> None:
    with pytest.raises(WithBlockNotFoundError, match="With block not found at line") as caught:
        gpt2.trace("Hello world")
    assert f"line {caught.traceback[0].lineno + 1} of {__file__}" in str(caught.value)


def test_info_has_the_source_its_first_line_and_the_frame(tiny: NNsight, features: torch.Tensor) -> None:
    class Keep(Backend):
        def __call__(self, tracer: Tracer | None = None) -> None:
            assert tracer is not None
            kept.append(tracer.info)
            frames.append(tracer.info.frame)

    kept: list[Info] = []
    frames: list[FrameType | None] = []
    line = sys._getframe().f_lineno + 2
    with tiny.trace(features, backend=Keep()):
        hidden = tiny.layer1.output
        doubled = (hidden * 2).save()

    (info,) = kept
    assert [text.strip() for text in info.source] == [
        "hidden = tiny.layer1.output",
        "doubled = (hidden * 2).save()",
    ]
    assert (info.filename, info.start_line) == (__file__, line)
    assert frames == [sys._getframe()]  # known until the trace ends
    with pytest.raises(UnboundLocalError):
        print(doubled)  # noqa: T201 - nothing ran, so there is nothing to print
