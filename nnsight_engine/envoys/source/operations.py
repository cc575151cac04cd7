"""Data types of a rewritten function. ``rewrite`` creates them; envoys and listings read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import FunctionType
from typing import Any

OperationCall = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Replaces a call expression: receives the operation's name, the callee, its positional and its
keyword arguments, and returns the expression's value.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One call expression of a function.

    Attributes:
        name: The callee with underscores for dots, and its running number: ``self_c_proj_0``.
        line: The line at which the callee ends, counted from 0 at the function's first line, so
            that ``first_line + line`` is the line in the file.
        end_line: The line of the closing parenthesis, counted the same way.
        text: The source text of the expression.
    """

    name: str
    line: int
    end_line: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten:
    """A function whose calls go through an ``OperationCall``.

    Attributes:
        function: Replacement of the original: same signature, globals and closure. A plain function
            even for a bound method; the caller binds it.
        operations: In the order of evaluation.
        source: The text of the function whose body was rewritten, decorators included, dedented.
        first_line: Its first line in the file, counted from 1.
        filename: The file, as named in tracebacks.
    """

    function: FunctionType
    operations: tuple[Operation, ...]
    source: str
    first_line: int
    filename: str
