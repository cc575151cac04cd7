"""A block is captured, parsed, compiled, and run beside the model."""

from __future__ import annotations

import importlib.util
import io
import os
import pty
import runpy
import select
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from nnsight_engine.intervention.backends.base import Backend
from nnsight_engine.intervention.tracing.base import Info, Tracer, WithBlockNotFoundError

import nnsight_engine
from nnsight_engine import LanguageModel, NNsight
from tests.guide.alone import tokens
from tests.guide.modules import TinyMLP
from tests.hook_reference import outputs_of

SCRIPT = """
import nnsight_engine, torch
from tests.guide.modules import TinyMLP

model = nnsight_engine.NNsight(TinyMLP())
with model.trace(torch.ones(1, 5)):
    hidden = model.layer1.output.save()
"""


def first_layer_of_ones() -> torch.Tensor:
    """Return what ``SCRIPT`` is to find."""
    result: torch.Tensor = TinyMLP().layer1(torch.ones(1, 5))
    return result


def imported(path: Path) -> ModuleType:
    """Import a file that is no part of the project."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typed_at_the_prompt(lines: list[str], history: Path) -> str:
    """Type the lines into ``python`` at a terminal, and return what it shows."""
    terminal, other_side = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PYTHON_HISTORY": str(history), "PYTHON_BASIC_REPL": "1"}
    shown = ""
    root = Path(nnsight_engine.__file__).parents[1]
    command = [sys.executable, "-q"]
    with subprocess.Popen(
        command, stdin=other_side, stdout=other_side, stderr=other_side, env=environment, cwd=root
    ) as python:
        os.close(other_side)
        try:
            for line in [*lines, "exit()"]:
                shown += read_until_prompt(terminal)
                os.write(terminal, line.encode() + b"\n")
            shown += read_until_prompt(terminal)
        finally:
            python.kill()
            os.close(terminal)
    return shown


def read_until_prompt(terminal: int) -> str:
    """Return what is shown until the next line may be typed, or the program ends."""
    shown = b""
    while not shown.endswith((b">>> ", b"... ")) and select.select([terminal], [], [], 60.0)[0]:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the other side is closed
            break
    return shown.decode()


def test_the_block_does_not_run_directly_but_beside_the_model(tiny: NNsight, features: torch.Tensor) -> None:
    order: list[str] = []
    tiny.layer1._module.register_forward_pre_hook(lambda *_: order.append("layer1 runs"))

    with tiny.trace(features):
        order.append("the block begins")
        hidden = tiny.layer1.output.save()
        order.append("the block has its value")

    assert order == ["the block begins", "layer1 runs", "the block has its value"]
    assert torch.equal(hidden, TinyMLP().layer1(features))


# 2.1 Capture.


def test_source_is_found_in_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert torch.equal(runpy.run_path(str(script))["hidden"], first_layer_of_ones())


def test_source_is_what_it_was_when_the_script_was_first_read(tmp_path: Path) -> None:
    before = """
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
    path.write_text(textwrap.dedent(before))
    module = imported(path)
    model, x = NNsight(TinyMLP()), torch.ones(1, 5)
    assert torch.equal(module.first(model, x), first_layer_of_ones())

    path.write_text("# a line more\n# and another\n" + textwrap.dedent(before).replace("* 2", "* 3"))
    assert torch.equal(module.second(model, x), first_layer_of_ones() * 2)


def test_source_is_found_in_a_notebook_cell() -> None:
    shell = InteractiveShell()
    shell.user_ns["expected"] = first_layer_of_ones()
    result = shell.run_cell(SCRIPT)
    assert result.error_in_exec is None
    result = shell.run_cell("with model.trace(torch.zeros(1, 5)):\n    again = model.layer1.output.save()")
    assert result.error_in_exec is None
    assert torch.equal(shell.user_ns["hidden"], shell.user_ns["expected"])
    assert torch.equal(shell.user_ns["again"], TinyMLP().layer1(torch.zeros(1, 5)))


def test_source_of_a_nested_trace_is_taken_from_the_trace_around_it(gpt2: LanguageModel) -> None:
    with gpt2.session():
        with gpt2.trace("Hello"):
            hidden = gpt2.transformer.h[0].output
        with gpt2.trace() as tracer, tracer.invoke("World"):
            gpt2.transformer.h[0].output[:] = hidden
            patched = gpt2.transformer.h[1].output.save()

    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello"), "transformer.h.1")
    assert torch.equal(patched, expected)


def test_source_is_found_at_the_python_prompt(tmp_path: Path) -> None:
    lines = [*SCRIPT.splitlines(), "", "print('sum', float(hidden.detach().double().sum()))"]
    expected = f"sum {float(first_layer_of_ones().detach().double().sum())}"
    assert expected in typed_at_the_prompt(lines, tmp_path / "history")


def test_indentation_of_the_surroundings_is_removed(tiny: NNsight, features: torch.Tensor) -> None:
    if True:
        for _ in range(1):
            with tiny.trace(features):
                hidden = tiny.layer1.output.save()
                text = nnsight_engine.save(
                    """
    indented text stays as it is
"""
                )
    assert torch.equal(hidden, TinyMLP().layer1(features))
    assert text == "\n    indented text stays as it is\n"


# 2.2 Parse.


def test_multiple_contexts_in_one_with_statement(gpt2: LanguageModel) -> None:
    with gpt2.trace("Hello world"), torch.no_grad():
        in_block = nnsight_engine.save(torch.is_grad_enabled())
        logits = gpt2.lm_head.output.save()

    assert not in_block
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello world"), "lm_head")
    assert torch.equal(logits, expected)


def test_a_context_before_the_trace_holds_for_the_model_too(gpt2: LanguageModel) -> None:
    with torch.no_grad(), gpt2.trace("Hello world"):
        logits = gpt2.lm_head.output.save()
    assert not logits.requires_grad


def test_a_with_statement_over_several_lines(gpt2: LanguageModel) -> None:
    # fmt: off
    with gpt2.trace(
        "Hello world"
    ):
        logits = gpt2.lm_head.output.save()
    # fmt: on
    (expected,) = outputs_of(gpt2._module, tokens(gpt2, "Hello world"), "lm_head")
    assert torch.equal(logits, expected)


def test_a_trace_without_a_with_block_is_reported_with_its_line(gpt2: LanguageModel) -> None:
    with pytest.raises(WithBlockNotFoundError, match="With block not found at line") as caught:
        gpt2.trace("Hello world")
    assert f"line {caught.traceback[0].lineno + 1} of {__file__}" in str(caught.value)


def test_a_block_whose_source_changed_is_reported_with_its_surroundings(tmp_path: Path) -> None:
    path = tmp_path / "changed_before_it_ran.py"
    path.write_text(
        "def run(model, x):\n    with model.trace(x):\n        value = model.layer1.output.save()\n"
    )
    module = imported(path)
    path.write_text("# one\n# two\n# three\n\n\n\nX = 1\n")
    with pytest.raises(WithBlockNotFoundError, match="We looked here:") as caught:
        module.run(NNsight(TinyMLP()), torch.ones(1, 5))
    assert "at line 2" in str(caught.value)
    assert "# two  <--- HERE" in str(caught.value)


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

    info = kept[0]
    assert [text.strip() for text in info.source] == [
        "hidden = tiny.layer1.output",
        "doubled = (hidden * 2).save()",
    ]
    assert info.start_line == line
    assert frames == [sys._getframe()]  # known until the trace ends
    with pytest.raises(UnboundLocalError):
        print(doubled)  # noqa: T201 - nothing ran, so there is nothing to print


# 2.3 Compile.


def test_a_backend_is_given_the_block_as_a_function(tiny: NNsight, features: torch.Tensor) -> None:
    class RunTwice(Backend):
        def __call__(self, tracer: Tracer | None = None) -> None:
            assert tracer is not None
            function = super().__call__(tracer)
            tracer.execute(function)

    with tiny.trace(features, backend=RunTwice()):
        hidden = tiny.layer1.output.save()
    assert torch.equal(hidden, TinyMLP().layer1(features))


def test_a_block_prints_as_plain_code_does(tiny: NNsight, features: torch.Tensor) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed), tiny.trace(features):
        print("shape:", tuple(tiny.layer1.output.shape))  # noqa: T201 - that is the example
    assert printed.getvalue() == "shape: (1, 10)\n"
