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
    """One call expression of a function, named by its callee and a running number: ``self_c_proj_0``.

    Lines count from 0 at the function's first line: that at which the callee ends, that of the closing
    parenthesis.
    """

    name: str
    line: int
    end_line: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten:
    """A function whose calls go through an ``OperationCall``; ``operations`` are in the order of evaluation.

    ``function`` is plain even for a bound method; the caller binds it. ``source`` is the text of the function
    whose body was rewritten, decorators included, dedented.
    """

    function: FunctionType
    operations: tuple[Operation, ...]
    source: str
    first_line: int
    filename: str
