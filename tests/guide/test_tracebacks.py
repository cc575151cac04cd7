"""An error in a block looks like one in plain code."""

from __future__ import annotations

import linecache
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nnsight_engine
from nnsight_engine import CONFIG, LanguageModel, NNsight
from nnsight_engine.tracing.source_text import WithBlockNotFoundError
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


def of_another_shape(model: LanguageModel) -> None:
    with model.trace("Hello"):
        model.transformer.h[0].output = torch.zeros(1, 5, 7)


def of_another_dtype(model: LanguageModel) -> None:
    with model.trace("Hello"):
        model.transformer.h[0].output = model.transformer.h[0].output.double()


def of_another_type(model: LanguageModel) -> None:
    with model.trace("Hello"):
        model.transformer.h[1].mlp.output = (torch.zeros(1, 5, 128),)


def as_an_input(model: LanguageModel) -> None:
    with model.trace("Hello"):
        model.transformer.h[0].input = torch.zeros(1, 5, 7)


def in_place_of_a_run(model: LanguageModel) -> None:
    with model.trace("Hello"):
        model.transformer.h[0].mlp.skip(torch.zeros(1, 5, 7))


WRONG_VALUES: dict[Callable[[LanguageModel], None], tuple[str, str]] = {
    of_another_shape: ("h.0.output", r"\[1, 5, 128\] of torch.float32 on cpu, got a tensor \[1, 5, 7\]"),
    of_another_dtype: ("h.0.output", r"expected .* torch.float32 on cpu, got .* of torch.float64"),
    of_another_type: ("h.1.mlp.output", "expected a tensor, got a tuple of 1"),
    as_an_input: ("h.0.input", r"got a tensor \[1, 5, 7\]"),
    in_place_of_a_run: ("h.0.mlp was skipped", ""),
}


@pytest.mark.parametrize("run", WRONG_VALUES)
def test_an_error_of_the_model_names_the_line_that_gave_it_the_wrong_value(
    gpt2: LanguageModel, run: Callable[[LanguageModel], None]
) -> None:
    place, difference = WRONG_VALUES[run]
    line = run.__code__.co_firstlineno + 2
    with pytest.raises((RuntimeError, TypeError)) as caught:
        run(gpt2)
    (note,) = caught.value.__notes__
    assert place in note
    assert f"at line {line} of {__file__}, `{linecache.getline(__file__, line).strip()}`" in note
    assert re.search(difference, note)


def test_an_error_of_the_model_alone_names_no_assignment(gpt2: LanguageModel) -> None:
    with pytest.raises(RuntimeError) as caught, gpt2.trace("Hello"):
        gpt2.transformer.h[0].output = gpt2.transformer.h[0].output * 2  # fits
        gpt2.transformer.h[1].output = torch.zeros(1, 5, 7)  # does not
    (note,) = caught.value.__notes__
    assert "h.1.output" in note


def test_an_older_scripts_first_item_is_explained_where_it_fails(gpt2: LanguageModel) -> None:
    with pytest.raises(IndexError, match="too many indices") as caught, gpt2.trace("Hello"):
        gpt2.transformer.h[0].output[0][:, -1, :].save()
    (note,) = caught.value.__notes__
    assert "Write `output` for what is `output[0]` in older scripts" in note
    with pytest.raises(ValueError, match="`output` is what `output\\[0\\]` was"), gpt2.trace("Hello"):
        hidden = gpt2.transformer.h[0].output[0]
        with gpt2.lm_head.output.sum().backward():
            hidden.grad[:, -1, :].save()


def an_output(model: NNsight) -> Any:
    return model.layer1.output


def an_assignment(model: NNsight) -> Any:
    model.layer1.output = 1


def a_next_step(model: NNsight) -> Any:
    return model.layer1.next()


def a_forgotten_with(model: NNsight) -> Any:
    model.trace(torch.ones(1, 5))


def a_return(model: NNsight) -> Any:
    with model.trace(torch.ones(1, 5)):
        return model.output


def a_result(model: NNsight) -> Any:
    with model.trace(torch.ones(1, 5)) as tracer:
        model.output.save()
    return tracer.result


def an_early_stop(model: NNsight) -> Any:
    with model.trace(torch.ones(1, 5)) as tracer:
        model.output.save()
    tracer.stop()


OUTSIDE = [an_output, an_assignment, a_next_step, a_forgotten_with, a_return, a_result, an_early_stop]


@pytest.mark.parametrize("use", OUTSIDE)
def test_errors_outside_of_a_run_have_the_users_frames_alone(
    tiny: NNsight, use: Callable[[NNsight], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((ValueError, SyntaxError, WithBlockNotFoundError)) as caught:
        use(tiny)
    assert [frame.name for frame in frames_of(caught.value)][1:] == [use.__name__]
    assert sys.gettrace() is None or OURS not in str(sys.gettrace())
    monkeypatch.setattr(CONFIG.APP, "DEBUG", True)
    with pytest.raises((ValueError, SyntaxError, WithBlockNotFoundError)) as caught:
        use(tiny)
    assert frames_of(caught.value)[-1].filename.startswith(OURS)


def test_standard_points_outside_of_a_run_have_the_users_frames_alone(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder)  # that no test has scanned
    with pytest.raises(ValueError, match="not interleaving") as caught:
        _ = model.logits
    assert len(frames_of(caught.value)) == 1
    assert caught.value.__context__ is None
    with pytest.raises(ValueError, match="not interleaving") as caught:
        model.points["layers.0.output"] = torch.ones(1)
    assert len(frames_of(caught.value)) == 1


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
