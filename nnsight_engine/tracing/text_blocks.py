"""Compilation of a block from text, as if indented in a ``with`` statement: its line 1 becomes line 2."""

from __future__ import annotations

import ast

from nnsight_engine.tracing.blocks import Block, BlockContext, Nested, compile_block
from nnsight_engine.tracing.parsing import parse
from nnsight_engine.tracing.source_text import SourceText

NUM_LINES_BEFORE = 1
"""Number of lines of a block's source that precede the text."""
_STATEMENT = "with trace:\n"
_INDENT = "    "


def block_of_text(text: str, filename: str, names: frozenset[str]) -> Block:
    """Compile text as a block whose ``names`` are bound at its start; errors have the text's lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    tree = _parsed(text, filename)
    if not tree.body:
        raise SyntaxError("there are no statements in it", (filename, 1, 1, ""))
    try:
        return _compiled(_STATEMENT + _indented(text, tree), filename, names)
    except SyntaxError as error:
        error.lineno = max((error.lineno or 1) - NUM_LINES_BEFORE, 1)
        raise
    except (RecursionError, MemoryError) as error:
        raise _too_deep(filename) from error


def _compiled(whole: str, filename: str, names: frozenset[str]) -> Block:
    (statement,) = parse(whole, filename).body
    assert isinstance(statement, ast.With)  # noqa: S101 - the text begins with it
    lines = tuple(f"{line}\n" for line in whole.split("\n"))
    source = SourceText(filename, lines, ast.Module(body=[statement], type_ignores=[]))
    context = BlockContext(name="trace", class_name=None, first_argument=None, flags=0)
    return compile_block(Nested(statement, 0), source, names, context)


def _parsed(text: str, filename: str) -> ast.Module:
    try:
        return parse(text, filename)
    except (RecursionError, MemoryError) as error:
        raise _too_deep(filename) from error
    except SyntaxError as error:
        if error.lineno is None:  # null bytes
            error.lineno = 1
        raise


def _too_deep(filename: str) -> SyntaxError:
    return SyntaxError("its expressions or statements are nested too deeply", (filename, 1, 1, ""))


def _indented(text: str, tree: ast.Module) -> str:
    kept: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and _is_text(node.value)):
            kept.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    lines = text.split("\n")
    return "\n".join(
        line if number in kept or not line.strip() else _INDENT + line
        for number, line in enumerate(lines, start=1)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str | bytes)
