"""The text of a statement typed at the prompt, from readline's history: older interpreters discard it.

The history lacks blank and repeated lines, so lines are accepted only if they compile to the same code,
positions included.
"""

from __future__ import annotations
import __future__

import ast
import codeop
import itertools
import warnings
from collections.abc import Iterator, Sequence
from types import CodeType

_MAX_STATEMENT_LINES = 500
_FUTURE_FLAGS = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
# Line starts without indentation that may continue the statement above.
_CLAUSES = ("else", "elif", "except", "finally", "case", ")", "]", "}")


def find_statement(history: Sequence[str], wanted: CodeType) -> str | None:
    """Return the newest statement in ``history``, oldest first, that compiles to ``wanted`` or around it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings were shown when the statement ran
        for start in reversed(range(len(history))):
            if not history[start][:1].strip():
                continue  # blank or indented: no statement starts here
            for lines in _statements_from(history, start, wanted):
                for text in _with_missing_lines(lines, wanted):
                    if compiles_to(text, wanted, mode="single"):
                        return text
    return None


def compiles_to(text: str | ast.Module, wanted: CodeType, *, mode: str) -> bool:
    """Return whether ``wanted`` is, or is inside, the code of ``text``; ``mode`` is that of ``compile``."""
    flags = wanted.co_flags & _FUTURE_FLAGS | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        root = compile(text, wanted.co_filename, mode, flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    codes = [root]
    while codes:
        code = codes.pop()
        if code == wanted:  # compares names, constants, instructions and positions, but not the file name
            return True
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


def _statements_from(history: Sequence[str], start: int, wanted: CodeType) -> Iterator[Sequence[str]]:
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= wanted.co_flags & _FUTURE_FLAGS | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for end in range(start + 1, min(len(history), start + _MAX_STATEMENT_LINES) + 1):
        lines = history[start:end]
        try:
            complete = compiler("\n".join(lines) + "\n", wanted.co_filename, "single") is not None
        except (SyntaxError, ValueError, OverflowError):
            return
        if complete:
            yield lines
            if end < len(history) and not history[end].startswith((" ", "\t", *_CLAUSES)):
                return


def _with_missing_lines(lines: Sequence[str], wanted: CodeType) -> Iterator[str]:
    """Yield the statement as recorded, then with lines that readline may have left out."""
    yield "\n".join(lines) + "\n"
    num_missing = _last_line(wanted) - len(lines)
    if 0 < num_missing < _MAX_STATEMENT_LINES:
        for index, line in itertools.product(range(1, len(lines)), ("", None)):
            missing = [lines[index - 1] if line is None else line] * num_missing
            yield "\n".join([*lines[:index], *missing, *lines[index:]]) + "\n"
        yield "\n".join([*lines, *[lines[-1]] * num_missing]) + "\n"


def _last_line(code: CodeType) -> int:
    own = (end for _, end, _, _ in code.co_positions() if end is not None)
    nested = (_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return max(itertools.chain(own, nested), default=0)
