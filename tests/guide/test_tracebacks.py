"""An error in a block looks like one in plain code."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nnsight_engine
from nnsight_engine import CONFIG, LanguageModel, NNsight
from tests.guide.modules import TinyMLP

OURS = str(Path(nnsight_engine.__file__).parent)

EXPERIMENT = """\
from nnsight_engine import NNsight
import torch

model = NNsight(torch.nn.Sequential(torch.nn.Linear(5, 5)))

with model.trace(torch.ones(1, 5)):
    hidden = model[100].output.save()  # there is one layer only
"""


def line_of_caller(offset: int = 0) -> int:
    """Return the line that the caller is at, moved by ``offset``."""
    return sys._getframe(1).f_lineno + offset


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames that the user sees, outermost first."""
    return list(traceback.extract_tb(error.__traceback__))


def test_an_error_keeps_its_type_and_points_at_the_users_line(gpt2: LanguageModel) -> None:
    with pytest.raises(IndexError, match="list index out of range") as caught:
        line = line_of_caller(2)
        with gpt2.trace("Hello"):
            gpt2.transformer.h[100].output.save()

    last = frames_of(caught.value)[-1]
    assert last.filename == __file__
    assert last.lineno == line
    assert last.line == "gpt2.transformer.h[100].output.save()"
    assert last.name == "test_an_error_keeps_its_type_and_points_at_the_users_line"
    assert type(caught.value) is IndexError
    assert {frame.filename for frame in frames_of(caught.value)} == {__file__}  # ours are hidden
    shown = "".join(traceback.format_exception(caught.value))
    assert "During handling" not in shown
    assert "direct cause" not in shown


def test_our_frames_are_shown_in_debug_mode(gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG.APP, "DEBUG", True)
    with pytest.raises(IndexError) as caught, gpt2.trace("Hello"):
        gpt2.transformer.h[100].output.save()
    files = [frame.filename for frame in frames_of(caught.value)]
    assert any(file.startswith(OURS) for file in files)
    assert __file__ in files


def test_a_script_fails_as_plain_python_does(tmp_path: Path) -> None:
    script = tmp_path / "my_experiment.py"
    script.write_text(EXPERIMENT)
    root = str(Path(OURS).parent)
    command = [sys.executable, str(script)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert run.returncode == 1
    lines = [line for line in run.stderr.splitlines() if set(line.strip()) - set("~^")]
    assert lines[-5:] == [
        f'  File "{script}", line 6, in <module>',
        "    with model.trace(torch.ones(1, 5)):",
        f'  File "{script}", line 7, in <module>',
        "    hidden = model[100].output.save()  # there is one layer only",
        "IndexError: list index out of range",
    ]
    assert "<nnsight" not in run.stderr
    assert OURS not in run.stderr


def test_an_error_of_the_users_own_keeps_its_cause(tiny: NNsight, features: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="outer") as caught, tiny.trace(features):
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise RuntimeError("outer") from error
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_a_type_with_arguments_of_its_own_survives(tiny: NNsight, features: torch.Tensor) -> None:
    class CodedError(Exception):
        def __init__(self, code: int, *, hint: str) -> None:
            super().__init__(f"code {code}")
            self.code, self.hint = code, hint

    with pytest.raises(CodedError) as caught, tiny.trace(features):
        tiny.layer1.output.save()
        raise CodedError(7, hint="read the manual")
    assert (caught.value.code, caught.value.hint) == (7, "read the manual")


def in_an_invoke(model: LanguageModel) -> None:
    with model.trace() as tracer:
        with tracer.invoke("Hello"):
            model.lm_head.output.save()
        with tracer.invoke("World"):
            model.lm_head.output.save()
            raise LookupError("here")


def in_a_session(model: LanguageModel) -> None:
    with model.session(), model.trace("Hello"):
        model.lm_head.output.save()
        raise LookupError("here")


def in_a_backward_block(model: LanguageModel) -> None:
    with model.trace("Hello"):
        hidden = model.transformer.h[0].output
        with hidden.sum().backward():
            hidden.grad.save()
            raise LookupError("here")


def in_generation(model: LanguageModel) -> None:
    with model.generate("Hello", max_new_tokens=3) as tracer:
        for step in tracer.iter[:]:
            if step == 1:
                raise LookupError("here")


def in_an_edit(model: LanguageModel) -> None:
    with model.edit() as edited:
        model.lm_head.output.save()
        raise LookupError("here")
    with edited.trace("Hello"):
        edited.output.save()


def in_a_function_called_from_the_block(model: LanguageModel) -> None:
    def fail() -> None:
        raise LookupError("here")

    with model.trace("Hello"):
        model.lm_head.output.save()
        fail()


@pytest.mark.parametrize(
    "run",
    [
        in_an_invoke,
        in_a_session,
        in_a_backward_block,
        in_generation,
        in_an_edit,
        in_a_function_called_from_the_block,
    ],
)
def test_every_layer_of_tracing_leads_to_the_users_line(
    gpt2: LanguageModel, run: Callable[[LanguageModel], None]
) -> None:
    with pytest.raises(LookupError, match="here") as caught:
        run(gpt2)
    frames = frames_of(caught.value)
    assert frames[-1].filename == __file__
    assert frames[-1].line == 'raise LookupError("here")'
    assert not [frame for frame in frames if frame.filename.startswith(OURS)]


def test_an_error_inside_the_model_shows_the_models_own_frames(gpt2: LanguageModel) -> None:
    with pytest.raises(RuntimeError) as caught, gpt2.trace("Hello"):
        gpt2.transformer.h[0].output = torch.zeros(1, 5, 7)
    frames = frames_of(caught.value)
    assert frames[0].filename == __file__
    assert any("modeling_gpt2" in frame.filename for frame in frames)
    assert not [frame for frame in frames if frame.filename.startswith(OURS)]


def test_what_was_saved_before_the_error_is_kept(tiny: NNsight, features: torch.Tensor) -> None:
    with pytest.raises(LookupError), tiny.trace(features):
        hidden = tiny.layer1.output.save()
        raise LookupError("after that")
    assert torch.equal(hidden, TinyMLP().layer1(features))


def test_the_model_works_on_after_an_error(tiny: NNsight, features: torch.Tensor) -> None:
    with pytest.raises(LookupError), tiny.trace(features):
        tiny.layer1.output[:] = 0
        raise LookupError("in the middle")
    with tiny.trace(features):
        out = tiny.output.save()
    assert torch.equal(out, TinyMLP()(features))
    assert torch.equal(tiny._module(features), out)
