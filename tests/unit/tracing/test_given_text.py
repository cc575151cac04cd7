"""Text becomes a block that is the text: its lines, its strings, its errors."""

from __future__ import annotations

import traceback
from types import CellType
from typing import Any

import pytest

from nnsight_engine.core.closure_cells import UNBOUND, content
from nnsight_engine.serialization import SentBlock, decode_trace, encode_trace
from nnsight_engine.tracing.blocks import NUM_LINES_BEFORE, block_of_text
from nnsight_engine.tracing.tracer import Info, Tracer


def run(text: str, **given: Any) -> dict[str, Any]:
    """Run text as the worker does: sent and read."""
    block = block_of_text(text, "<given>", frozenset(given))
    cells = {name: CellType(value) for name, value in given.items()}
    sent = SentBlock(Info(block, cells, None, {"__name__": "__given__"}), cells)
    (info,) = decode_trace(encode_trace([sent])).blocks
    Tracer().compile_on(info)()
    values = {name: content(cell) for name, cell in info.variables.items()}
    return {name: value for name, value in values.items() if value is not UNBOUND}


def test_statements_see_what_is_given_and_assign() -> None:
    assert run("y = x + 1\nz = [y, *given]", x=1, given=[5])["z"] == [2, 5]
    assert run("\n\n# a comment\n\nx = 1\n\n")["x"] == 1
    assert run("import math\nx = math.floor(2.5)")["x"] == 2


STRINGS = '''
a = """one
  two
three"""; b = 1
c = ("x"
"y")
d = f"""{b}
 {b}"""
e = 'no\\
break'
if b:
\tf = """
\ttab"""
def g():
    """Doc
string."""
    return [
1,
    ]
h = g()
'''


def test_strings_keep_their_content_and_blocks_their_indents() -> None:
    made: dict[str, Any] = {}
    exec(STRINGS, made)
    found = run(STRINGS)
    for name in "abcdefh":
        assert found[name] == made[name], name
    assert found["g"].__doc__ == made["g"].__doc__
    assert run(STRINGS.replace("\n", "\r\n"))["a"] == made["a"]


def test_errors_show_the_texts_lines() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run("x = 1\n\ny = x / 0")
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, (last.lineno or 0) - NUM_LINES_BEFORE, last.line) == ("<given>", 3, "y = x / 0")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\ny = (", 2),
        ("x = 1\nreturn x", 2),
        ("x = 1\n\nyield x", 3),
        ("x = 1\nbreak", 2),
        ("x = 1\nawait x", 2),
        ("x = 1\n  y = 2", 2),
        ("x = 1\nfrom os import *", 2),
        ("x = 1\nfrom __future__ import annotations", 2),
        ("", 1),
        ("# nothing", 1),
        ("x = '\0'", 1),
        ("x = " + "(" * 500 + "1" + ")" * 500, 1),
        ("x = " + "-" * 50_000 + "1", 1),
        ("x = 1" + " + 1" * 15_000, 1),
        ("x = y" + ".a" * 25_000, 1),
        ("x = " + "[" * 90 + "lambda: " * 9_000 + "1" + "]" * 90, 1),
        ("if 1:\n  pass\n" + "elif 1:\n  pass\n" * 4_000, 1),
    ],
    ids=lambda value: str(value)[:20].replace("\0", "0"),
)
def test_what_is_no_block_is_a_syntax_error_with_its_line(text: str, line: int) -> None:
    with pytest.raises(SyntaxError) as caught:
        block_of_text(text, "<given>", frozenset())
    assert caught.value.lineno == line
