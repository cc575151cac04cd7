"""The text of a notebook cell that begins with ``%%time``, which IPython compiles without registering it."""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
import warnings
from collections.abc import Iterator
from types import CodeType

from nnsight_engine.tracing.interactive_statements import compiles_to
from nnsight_engine.tracing.parsing import parse


def find_timed_cell(wanted: CodeType) -> str | None:
    """Return the body of the newest ``%%time`` cell that compiles to ``wanted`` or to code around it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings were shown when the cell ran
        for text in _bodies():
            if compiles_to(text, wanted, mode="exec"):
                return text
            # A last expression is compiled separately, so that its value can be shown.
            try:
                without_last = parse(text)
            except (SyntaxError, ValueError):
                continue
            del without_last.body[-1:]
            if compiles_to(without_last, wanted, mode="exec"):
                return text
    return None


def _bodies() -> Iterator[str]:
    """Yield the bodies of ``%%time`` cells, newest first, as IPython compiled them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    for entry in reversed(list(linecache.cache.values())):
        lines = entry[2] if len(entry) == 4 else []  # a shorter entry is a file that was not read yet
        if not any("run_cell_magic(" in line for line in lines):
            continue
        with contextlib.suppress(SyntaxError, ValueError):
            for node in ast.walk(parse("".join(lines))):
                match node:
                    case ast.Call(
                        func=ast.Attribute(attr="run_cell_magic"),
                        args=[ast.Constant(value="time"), _, ast.Constant(value=str(body))],
                    ):
                        yield shell.transform_cell(body)
