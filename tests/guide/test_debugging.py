"""Errors keep their type, lead to the line that was written, and say what to do."""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import pytest
import torch
from nnsight_engine.intervention.interleaver import MissedProviderError, OutOfOrderError

import nnsight_engine
from nnsight_engine import CONFIG, LanguageModel, NNsight
from tests.guide.alone import module_of

OURS = str(Path(nnsight_engine.__file__).parent)

SCRIPT = """\
# An experiment with a mistake in it.

def main():
    with model.trace("Hello"):
        first = model.transformer.h[0].output.save()
        hidden = model.transformer.h[100].output.save()

main()
"""


def files_and_lines(error: BaseException) -> list[tuple[str, int]]:
    """Return where each frame of an error is, the innermost last."""
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]


def without_exit(error: BaseException) -> list[tuple[str, int]]:
    """Return the same without the one frame that Python adds after the block has failed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame.name for frame in frames if frame.filename.startswith(OURS)]
    assert ours in ([], ["__exit__"])
    return [(frame.filename, frame.lineno or 0) for frame in frames if frame.name != "__exit__"]


def line_of(text: str) -> int:
    """Return the number of the line of this file that is ``text``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.strip() == text]
    return number


def test_an_error_leads_to_the_line_as_written(gpt2: LanguageModel) -> None:
    with pytest.raises(IndexError, match="list index out of range") as caught, gpt2.trace("Hello"):
        gpt2.transformer.h[0].output.save()
        the_mistake = gpt2.transformer.h[100].output.save()  # the mistake
        del the_mistake
    where = files_and_lines(caught.value)
    assert where[-1] == (
        __file__,
        line_of("the_mistake = gpt2.transformer.h[100].output.save()  # the mistake"),
    )
    assert not any(filename.startswith(OURS) for filename, _ in without_exit(caught.value))


def test_an_uncaught_error_is_shown_as_python_shows_its_own(
    gpt2: LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "my_experiment.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with pytest.raises(IndexError) as caught:
        runpy.run_path(str(script), {"model": gpt2})
    sys.__excepthook__(caught.type, caught.value, caught.tb)
    text = capsys.readouterr().err
    assert f'File "{script}", line 6, in main\n    hidden = model.transformer.h[100].output.save()' in text
    assert text.endswith("IndexError: list index out of range\n")
    assert f'File "{OURS}' not in text
    assert "During handling of the above exception" not in text


def test_an_error_is_caught_by_its_own_type(gpt2: LanguageModel) -> None:
    caught = False
    try:
        with gpt2.trace("Hello"):
            gpt2.transformer.h[100].output.save()
    except IndexError:
        caught = True
    assert caught


def test_an_error_of_the_model_itself_keeps_its_type_too(tiny: NNsight) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), tiny.trace(torch.rand(1, 7)):
        tiny.layer1.output.save()


def test_a_trace_works_after_one_that_failed(gpt2: LanguageModel) -> None:
    with pytest.raises(IndexError), gpt2.trace("Hello"):
        gpt2.transformer.h[100].output.save()
    with gpt2.trace("Hello"):
        logits = gpt2.lm_head.output.save()
    assert torch.equal(logits, module_of(gpt2)(**gpt2.tokenizer("Hello", return_tensors="pt")).logits)


def test_debug_mode_shows_the_librarys_frames(gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG.APP, "DEBUG", True)
    with pytest.raises(IndexError) as caught, gpt2.trace("Hello"):
        gpt2.transformer.h[100].output.save()
    where = files_and_lines(caught.value)
    assert any(filename.startswith(OURS) for filename, _ in where)
    assert any(filename == __file__ for filename, _ in where)


def test_an_error_in_a_function_called_by_the_block_shows_its_frames_too(gpt2: LanguageModel) -> None:
    def fails(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no use for {tuple(hidden.shape)}")

    with pytest.raises(RuntimeError, match="no use for") as caught, gpt2.trace("Hello"):
        fails(gpt2.transformer.h[0].output)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "fails"
    assert len(names) >= 2


def test_the_iteration_is_in_the_message(gpt2: LanguageModel) -> None:
    layers = gpt2.transformer.h
    with pytest.raises(OutOfOrderError, match=r"model\.transformer\.h\.0\.output\.i0"), gpt2.trace("Hello"):
        layers[1].output.save()
        layers[0].output.save()
    with (
        pytest.raises(OutOfOrderError, match=r"model\.transformer\.h\.0\.output\.i1"),
        gpt2.generate("Hello", max_new_tokens=3, min_new_tokens=3) as tracer,
    ):
        for _step in tracer.iter[1]:
            layers[1].output.save()
            layers[0].output.save()


def test_a_module_that_is_never_called_is_named(gpt2: LanguageModel) -> None:
    """Attention dropout exists, and torch's own attention does not call it."""
    with (
        pytest.raises(
            MissedProviderError,
            match=r"Execution complete but `model\.transformer\.h\.0\.attn\.attn_dropout\.output\.i0`",
        ),
        gpt2.trace("Hello"),
    ):
        gpt2.transformer.h[0].attn.attn_dropout.output.save()


def test_values_that_never_come_are_value_errors(gpt2: LanguageModel) -> None:
    with pytest.raises(ValueError, match="was not provided"), gpt2.trace("Hello"):
        gpt2.generator.output.save()


def test_a_name_that_no_module_has_is_answered_with_how_to_see_those_there_are(gpt2: LanguageModel) -> None:
    with pytest.raises(AttributeError, match="has no attribute decoder") as caught, gpt2.trace("Hello"):
        gpt2.transformer.decoder.output.save()
    assert "print(model)" in str(caught.value)


def test_a_value_outside_of_a_trace_is_an_error_that_says_how_to_get_it(gpt2_folder: Path) -> None:
    model = LanguageModel(gpt2_folder)
    with pytest.raises(ValueError, match=r"The model did not execute.*with model\.trace\(input\)"):
        model.lm_head.output  # noqa: B018 - reading it is the test


def test_breakpoint_stops_in_the_block(gpt2: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[tuple[str, str, bool]] = []

    def stop() -> None:
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        assert isinstance(caller, FrameType)
        line = Path(caller.f_code.co_filename).read_text(encoding="utf-8").splitlines()[caller.f_lineno - 1]
        stops.append(
            (caller.f_code.co_filename, line.strip(), isinstance(caller.f_locals["out"], torch.Tensor))
        )

    monkeypatch.setattr(sys, "breakpointhook", stop)
    with gpt2.trace("Hello"):
        out = gpt2.transformer.h[0].output
        breakpoint()
        out[:] = 0
    assert stops == [(__file__, "breakpoint()", True)]


def test_the_traceback_of_an_invoke_leads_into_it(gpt2: LanguageModel) -> None:
    with pytest.raises(ZeroDivisionError) as caught, gpt2.trace() as tracer:
        with tracer.invoke("Hello"):
            gpt2.transformer.h[0].output.save()
        with tracer.invoke("World"):
            quotient = gpt2.transformer.h[0].output.shape[0] / 0  # in the second invoke
            del quotient
    line = line_of("quotient = gpt2.transformer.h[0].output.shape[0] / 0  # in the second invoke")
    assert files_and_lines(caught.value)[-1] == (__file__, line)
    assert isinstance(caught.value.__traceback__, TracebackType)
