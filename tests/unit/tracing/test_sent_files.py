"""Received code knows the text that it came with, wherever its sender says that it stands."""

from __future__ import annotations

import ast
import copy
import linecache
from pathlib import Path

from nnsight_engine.tracing.loaded_code import LinesFrom, SentFile, sent_name
from nnsight_engine.tracing.source_text import SourceReader

_TEXT = "def f():\n    return [g for g in ()]\nclass A:\n    def h(self): pass\n"


def test_a_reader_takes_their_text_from_it_and_from_no_file(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1\n" * 20)
    tree = ast.parse(_TEXT)
    name = SentFile(str(file), LinesFrom(7, _TEXT), lambda: tree)
    found = SourceReader().read(compile(tree, name, "exec"), {})
    assert found is not None
    assert found.tree is tree
    assert (found.filename, found.lines[6], len(found.lines)) == (str(file), "def f():\n", 10)
    assert str(file) not in linecache.cache


def test_a_name_travels_as_a_plain_one() -> None:
    name = SentFile("/etc/passwd", LinesFrom(1, _TEXT))
    assert name.line(1) == "def f():\n"
    assert sent_name(name) == sent_name("/etc/passwd") == "/etc/passwd"
    assert type(copy.copy(name)) is str  # what travels is the plain name


def test_lines_before_a_text_are_empty() -> None:
    lines = LinesFrom(3, "a\nb\n")
    assert list(lines) == lines[:] == ["\n", "\n", "a\n", "b\n"]
    assert (len(lines), lines[2], lines[-1], lines[3:9]) == (4, "a\n", "b\n", ["b\n"])
    name = SentFile("a", lines)
    assert [name.line(number) for number in (-1, 0, 1, 4, 5)] == ["", "", "\n", "b\n", ""]
