"""A file or a cell that was edited after its code was loaded: what was loaded runs, or nothing does."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from nnsight_engine.core.saves import save
from nnsight_engine.serialization import TRUSTED, EncodeError, decode, encode
from nnsight_engine.tracing.source_text import WithBlockNotFoundError
from nnsight_engine.tracing.tracer import Tracer

TEXT = """\
import math
from contextlib import *
from nnsight_engine.core.saves import save
from nnsight_engine.tracing.tracer import Tracer


def run():
    with Tracer() as tracer:
        a = math.floor(3.7, *()) + 2
        found = save([a if a > 4 else -a, [one for one in range(a)], f"{a:>3}"])
    return found


def plain():
    return math.floor(3.7) + 2
"""
LOADED = [5, [0, 1, 2, 3, 4], "  5"]

EDITS = {
    "another constant": ("3.7", "9.7"),
    "another operator": (") + 2", ") - 2"),
    "another name": ("math.floor(3.7, *()", "math.ceil_(3.7, *()"),
    "another comparison": ("a > 4", "a < 4"),
    "another call": ("range(a)", "list(a) "),
    "another format": ("{a:>3}", "{a:<3}"),
    "a statement more": ("    return found", "        found = save([])\n    return found"),
    "a statement less": ("        a = math.floor(3.7, *()) + 2\n", ""),
    "a line before": ("\n\ndef run", "\n\n\ndef run"),
    "another function": (
        "def run():\n    with Tracer() as tracer:\n",
        "def run():\n    with Tracer() as other:\n",
    ),
    "another element": ("save([a if", "save((a if"),
}


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, Path]]:
    """Import the text as a module."""
    path = tmp_path / f"edited_{tmp_path.name}.py"
    path.write_text(TEXT, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(path.stem)
    yield module, path
    del sys.modules[path.stem]


def write(path: Path, text: str) -> None:
    """Edit a file, a while later: that is how it is told that it changed."""
    path.write_text(text, encoding="utf-8")
    later = path.stat().st_mtime + 10
    os.utime(path, (later, later))
    linecache.checkcache(str(path))


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_edited_before_the_first_trace_is_refused_by_name(
    loaded: tuple[ModuleType, Path], edit: str
) -> None:
    module, path = loaded
    before, after = EDITS[edit]
    assert before in TEXT
    write(path, TEXT.replace(before, after))
    with pytest.raises(WithBlockNotFoundError, match=path.name):
        module.run()


def test_an_edit_elsewhere_in_the_file_does_not_matter(loaded: tuple[ModuleType, Path]) -> None:
    module, path = loaded
    write(path, TEXT.replace("return math.floor(3.7) + 2", "return 7") + "\n\nmore = 1\n")
    assert module.run() == LOADED


def test_a_module_that_was_reloaded_runs_as_it_was_reloaded(loaded: tuple[ModuleType, Path]) -> None:
    module, path = loaded
    run: Callable[[], Any] = module.run
    assert run() == LOADED
    path.write_text(TEXT.replace(") + 2", ") - 2"), encoding="utf-8")
    os.utime(path, (path.stat().st_mtime + 10,) * 2)
    importlib.reload(module)
    assert module.run() == [-1, [0], "  1"]
    assert run() == LOADED


def test_what_was_loaded_before_a_reload_and_never_traced_is_refused(loaded: tuple[ModuleType, Path]) -> None:
    module, path = loaded
    run: Callable[[], Any] = module.run
    write(path, TEXT.replace(") + 2", ") - 2"))
    importlib.reload(module)
    assert module.run() == [-1, [0], "  1"]
    with pytest.raises(WithBlockNotFoundError, match=path.name):
        run()


def test_a_cell_that_was_edited_and_run_again() -> None:
    """Cells of some notebooks keep their name, under which the newest text is registered."""

    def cell(text: str) -> Callable[[], Any]:
        name = "<cell 7>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        variables: dict[str, Any] = {"Tracer": Tracer, "save": save}
        exec(compile(text, name, "exec"), variables)
        function: Callable[[], Any] = variables["run"]
        return function

    text = "def run():\n    with Tracer():\n        value = save([1])\n    return value\n"
    first = cell(text)
    second = cell(text.replace("[1]", "[2]"))
    assert second() == [2]
    with pytest.raises(WithBlockNotFoundError, match="cell 7"):
        first()
    third, fourth = cell(text), cell(text)
    assert (third(), fourth()) == ([1], [1])


def test_a_function_of_an_edited_file_is_not_sent(loaded: tuple[ModuleType, Path]) -> None:
    module, path = loaded
    write(path, TEXT.replace("floor(3.7) + 2", "floor(3.7) - 2"))
    with pytest.raises(EncodeError, match=path.name):
        encode(module.plain)
    importlib.reload(module)
    assert decode(encode(module.plain), policy=TRUSTED)() == 1


COMPILED_APART = """\
from nnsight_engine.core.saves import save
from nnsight_engine.tracing.tracer import Tracer


def run(word):
    with Tracer() as tracer:
        assert word
        found = save([word in {"a", "b", "c", "d", "e", "f", "g", "h"}, word in ("a", ("b", 1))])
    return found
"""


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ([], {"PYTHONHASHSEED": "1"}),
        ([], {"PYTHONHASHSEED": "2"}),
        ([], {"PYTHONNODEBUGRANGES": "1"}),
        (["-O"], {}),
    ],
)
def test_a_file_compiled_by_another_process_runs(
    options: list[str], variables: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "apart.py"
    path.write_text(COMPILED_APART, encoding="utf-8")
    compiled = tmp_path / "apart.pyc"
    writes = f"import py_compile; py_compile.compile({str(path)!r}, {str(compiled)!r}, doraise=True)"
    subprocess.run([sys.executable, *options, "-c", writes], env=os.environ | variables, check=True)
    loader = importlib.machinery.SourcelessFileLoader("apart", str(compiled))
    spec = importlib.util.spec_from_loader("apart", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert module.run("a") == [True, True]


CHECKED = """\
from nnsight_engine.core.saves import save
from nnsight_engine.tracing.tracer import Tracer


def run():
    with Tracer() as tracer:
        number: int = 1
        number += 20
        found = save([number])
    return found
"""


class CheckingLoader(importlib.machinery.SourceFileLoader):
    """Puts calls around what is assigned, as typeguard's import hook does."""

    def source_to_code(  # type: ignore[override] # importlib itself calls it on the loader
        self, data: Any, path: Any, *_: Any, **__: Any
    ) -> CodeType:
        tree = Checking().visit(ast.parse(data))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Checking(ast.NodeTransformer):
    """Does that."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.copy_location(
            ast.Assign([node.target], called(node, "(lambda value: value)", node.value)), node
        )

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        old = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)  # type: ignore[union-attr] # a name
        checked = called(node, "__import__('operator').iadd", old, node.value)
        return ast.copy_location(ast.Assign([node.target], checked), node)


def called(place: ast.stmt, function: str, *arguments: ast.expr) -> ast.expr:
    made = ast.Call(ast.parse(function, mode="eval").body, list(arguments), [])
    for one in ast.walk(made.func):
        if isinstance(one, ast.expr):
            ast.copy_location(one, place)
    return ast.copy_location(made, place)


@pytest.mark.parametrize(
    ("old", "new"),
    [("", ""), ("+= 20", "+= 30"), ("number: int = 1", "number: int = 2"), ("[number]", "[-number]")],
)
def test_a_module_whose_assignments_a_hook_checks_runs_unless_it_was_edited(
    tmp_path: Path, old: str, new: str
) -> None:
    path = tmp_path / "checked.py"
    path.write_text(CHECKED, encoding="utf-8")
    loader = CheckingLoader("checked", str(path))
    spec = importlib.util.spec_from_loader("checked", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    path.write_text(CHECKED.replace(old, new), encoding="utf-8")
    if old:
        with pytest.raises(WithBlockNotFoundError, match=r"checked\.py.*has changed.*a tool has rewritten"):
            module.run()
    else:
        assert module.run() == [21]


def test_an_operator_edited_in_a_module_with_a_hook_that_left_it_alone_is_refused(tmp_path: Path) -> None:
    class Loader(importlib.machinery.SourceFileLoader):
        """Changes nothing."""

    path = tmp_path / "hooked.py"
    path.write_text(CHECKED, encoding="utf-8")
    spec = importlib.util.spec_from_loader("hooked", Loader("hooked", str(path)))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    path.write_text(CHECKED.replace("+= 20", "-= 20"), encoding="utf-8")
    with pytest.raises(WithBlockNotFoundError, match=r"hooked\.py"):
        module.run()
