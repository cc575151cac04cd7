"""What is shown on a terminal, without a server."""

from __future__ import annotations

import io
import math
import subprocess
import sys

import pytest
from rich.console import Console
from rich.text import Text

from api_schemas.results import LogitLensResult
from app.terminal.lens import print_lens
from app.terminal.steering import Comparison, SteeringRequest
from app.terminal.text_display import MARK, plain, visible, with_differences


def marked(text: Text) -> list[str]:
    return [text.plain[span.start : span.end] for span in text.spans if span.style == MARK]


def test_words_that_differ_are_marked_on_both_sides() -> None:
    left, right = with_differences("I think dogs are bad", "I think all dogs are lovely", is_done=True)
    assert (marked(left), marked(right)) == (["bad"], ["all", "lovely"])
    assert right.plain == "I think all dogs are lovely"


def test_what_one_side_has_not_written_yet_is_no_difference() -> None:
    left, right = with_differences("I think", "I think dogs are", is_done=False)
    assert (marked(left), marked(right)) == ([], [])
    assert right.plain == "I think dogs are"
    assert marked(with_differences("I think", "I think dogs are", is_done=True)[1]) == ["dogs", "are"]


def test_blanks_are_kept_and_not_compared() -> None:
    left, right = with_differences("I think\n\ndogs are ", "I think dogs  are bad\n", is_done=True)
    assert (left.plain, right.plain) == ("I think\n\ndogs are ", "I think dogs  are bad\n")
    assert (marked(left), marked(right)) == ([], ["bad"])


def test_long_texts_are_compared_once_they_are_complete() -> None:
    baseline = " ".join(f"word{n % 97}" for n in range(6000))
    steered = baseline.replace("word5 ", "other ", 1)
    live = with_differences(baseline, steered, is_done=False)
    assert [text.plain for text in live] == [baseline, steered]
    assert [marked(text) for text in live] == [[], []]
    done = with_differences(baseline, steered, is_done=True)
    assert [text.plain for text in done] == [baseline, steered]
    assert "other" in marked(done[1])
    assert len(marked(done[1])) < 100


def test_a_model_cannot_steer_the_terminal() -> None:
    assert plain("a\x1b[2Jb\r\nc\td\u202e\x9b\u061c") == "a�[2Jb\nc\td���"
    assert plain("a\r") + plain("\nb") == "a\nb", "a line's end that comes in two pieces"
    assert visible(" a\nb\x1b") == r"·a↵b\u001b"
    assert visible("\r\n") == "␍↵"


def lens_of(num_tokens: int) -> LogitLensResult:
    rows = [
        {"top": [{"token": f" word{n}", "id": n, "logprob": math.log(0.5)}], "targets": []}
        for n in range(num_tokens)
    ]
    layers = {"2": rows, "10": rows}
    return LogitLensResult.model_validate({"positions": list(range(num_tokens)), "layers": layers})


@pytest.mark.parametrize("width", [20, 60, 100])
def test_a_lens_fits_the_terminal(width: int) -> None:
    tokens = [f" token{n}" for n in range(12)]
    for show_all in (False, True):
        file = io.StringIO()
        print_lens(lens_of(12), tokens, Console(file=file, width=width), show_all=show_all)
        lines = file.getvalue().splitlines()
        assert all(len(line) <= width for line in lines)
        assert "·token11" in file.getvalue()
        assert ("·token0" in file.getvalue()) == show_all
        assert [line.split()[0] for line in lines[1:3]] == ["10", "2"]
        assert "·word11  50%" in file.getvalue()


def test_commands_start_without_torch_vllm_and_the_server() -> None:
    program = (
        "import sys, app.cli\n"
        "print({'torch', 'vllm', 'fastapi', 'numpy', 'app.commands.serve', 'app.main'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"


@pytest.mark.parametrize(
    ("baseline", "steered", "summary"),
    [
        ("I am", "I am", "Both are the same."),
        ("I am", "I was", "What differs is marked."),
        ("I am", "I am not", "What differs is marked."),
        ("", "I", "What differs is marked."),
        ("I am", "I  am\n", "They differ only in whitespace"),
        ("", " \n", "They differ only in whitespace"),
        ("a\x1b", "a\x07", "They differ only in whitespace or control characters"),
        ("a\r", "a", "They differ only in whitespace"),
    ],
)
def test_marks_are_mentioned_only_where_there_are_some(baseline: str, steered: str, summary: str) -> None:
    shown = Comparison(SteeringRequest("", options={}, steering={}, history=[]), "joy")
    shown.texts, shown.done = [baseline, steered], [True, True]
    assert shown.summary().startswith(summary)
    console = Console(file=io.StringIO(), color_system="truecolor", force_terminal=True)
    colour = console.get_style(MARK).color
    drawn = [one.style for one in console.render(shown.draw(100)) if one.style is not None]
    are_marked = any(style.underline and style.color == colour for style in drawn)
    assert are_marked == ("is marked" in shown.summary())
