"""What the checker of untrusted blocks refuses, in which words, and what it leaves to the process."""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path
from types import CellType
from typing import Any

import pytest

from nnsight_engine.sandbox.block_checker import CHECKED, MODULES, check_syntax, load_modules
from nnsight_engine.serialization import SandboxError, SentBlock, decode_trace, encode_trace
from nnsight_engine.tracing.blocks import Nested, block_of_text
from nnsight_engine.tracing.tracer import Info


def refusal(code: str) -> SandboxError | None:
    """Return why a block with this code is refused; None if it is not."""
    tree = ast.parse(f"with model.trace():\n{textwrap.indent(code, '    ')}")
    try:
        check_syntax(Nested(tree.body[0], 0), "mine.py")  # type: ignore[arg-type] # a `with` statement
    except SandboxError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os", "the module `os` is not part of the sandbox's Python, at line 2 of mine.py; there"),
        ("x = 1\nimport torch.utils", "the module `torch.utils` is not part of the sandbox's Python, at"),
        ("import math, sys", "the module `sys`"),
        ("f(lambda: x.__class__)\nimport os\nh = __builtins__", "line 2 of mine.py"),  # the first
        ("from os import path", "the module `os`"),
        ("from torch.utils import data", "the module `torch.utils`"),
        ("from torch import _C", "the name `_C` of `torch`"),
        ("from . import mine", "an import by a relative name"),
        ("from torch import *", "at line 2 of mine.py; name what is imported"),
        ("h = x.__class__", "the attribute `__class__`"),
        ("h = f.__globals__['os']", "the attribute `__globals__`"),
        ("x.__dict__ = {}", "the attribute `__dict__`"),
        ("def f():\n    return g.gi_frame.f_back", "the attribute `f_back`"),
        ("try:\n    f()\nexcept Exception as e:\n    h = e.__traceback__", "line 5 of mine.py"),
        ("h = __builtins__", "the name `__builtins__`"),
        ("__import__('os')", "the name `__import__`"),
        ("async def f(): pass", "`async` and `await`"),
        ("h = [a async for a in b]", "`async` and `await`"),
        ("def f():\n    def g():\n        async with a: pass", "`async` and `await`"),
    ],
)  # fmt: skip
def test_what_could_not_run_is_refused_at_its_line(code: str, said: str) -> None:
    error = refusal(code)
    assert error is not None
    assert said in str(error)
    assert "docs/sandbox-language.md" in str(error)
    assert f"line {error.line} of mine.py" in str(error)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_of_the_list_may_be_imported(module: str) -> None:
    assert refusal(f"import {module}") is None
    assert refusal(f"import {module} as m") is None
    package, _, name = module.rpartition(".")
    assert refusal(f"from {package or module} import {name or 'anything'}") is None


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def __init__(self):\n        super().__init__()\n        self.__hidden = 1",
        "class A:\n    def __float__(self): return 1.0",
        "match x:\n    case 1: pass",
        "name = type(x).__name__",
        "try:\n    f()\nexcept* ValueError:\n    pass",
        "global shared\nshared = 1",
        "input = model.layers[0].input\nopen = 3\nh = open",
        "class A(metaclass=type): pass",
    ],
)
def test_what_could_run_is_left_to_the_process(code: str) -> None:
    assert refusal(code) is None


def test_other_items_of_the_statement_are_checked_and_the_code_before_is_not() -> None:
    tree = ast.parse("with a.__class__, model.trace() as t, b.__class__:\n    pass")
    statement: Any = tree.body[0]
    check_syntax(Nested(statement, 2), "mine.py")
    with pytest.raises(SandboxError, match="__class__"):
        check_syntax(Nested(statement, 1), "mine.py")


def test_a_deep_tree_is_read_without_recursion() -> None:
    node: ast.expr = ast.Name("x", ast.Load())
    for _ in range(100_000):
        node = ast.Attribute(node, "y", ast.Load(), lineno=1, col_offset=0)
    check_syntax(node, "mine.py")
    while isinstance(node, ast.Attribute):  # freed one by one
        node = node.value


def test_a_block_is_checked_where_it_is_read_and_not_only_the_first_time() -> None:
    info = Info(
        block_of_text("import os", "mine.py", frozenset()), dict[str, CellType](), None, {"__name__": "m"}
    )
    message = encode_trace([SentBlock(info, {})])
    assert decode_trace(message).blocks
    for _ in range(2):
        with pytest.raises(SandboxError, match="the module `os`"):
            decode_trace(message, policy=CHECKED)


def test_modules_are_loaded_ahead() -> None:
    load_modules()
    assert [module for module in MODULES if module not in sys.modules and module != "einops"] == []


def test_the_page_names_every_module() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sandbox-language.md").read_text()
    assert [module for module in MODULES if f"`{module}`" not in page] == []
