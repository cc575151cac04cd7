"""The text of a statement typed at the interactive prompt, found in readline's history.

Up to Python 3.12 (and later with ``PYTHON_BASIC_REPL``) the interpreter discards the text once it is
compiled. The history is not a transcript: blank lines are missing, and so is a line equal to the one before
it, and older sessions come first. So a run of lines is accepted only if compiling it gives the same code,
positions included. ``source_text`` calls this.
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
    """Return the newest statement in ``history`` that compiles to ``wanted`` or to code around it.

    Args:
        history: Lines as typed, oldest first, without line ends.
        wanted: The code of a statement, or of a function, class or comprehension inside one.
    """
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
    """Yield the runs of lines from ``start`` that are complete statements, shortest first."""
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
