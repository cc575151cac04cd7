"""Rewrites a function so that each of its calls goes through a callback.

Positions are the original's, so errors show its source. Invariant: with a ``call`` that only makes the call,
the rewritten function behaves as the original, whose globals and closure cells are shared and not changed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from nnsight_engine.envoys.source.definition import compile_definition, find_definition
from nnsight_engine.envoys.source.errors import SourceNotAvailableError
from nnsight_engine.envoys.source.marking import OPERATION_NAME, mark_operations
from nnsight_engine.envoys.source.operations import OperationCall, Rewritten
from nnsight_engine.envoys.source.wrappers import like, plain_function, with_inner


def rewrite(function: Callable[..., Any], call: OperationCall, name: str) -> Rewritten:
    """Rewrite a function's own calls, of a decorated one its innermost body's, into operations."""
    try:
        inspect.unwrap(function)
    except ValueError as error:
        raise SourceNotAvailableError(
            name, "its __wrapped__ leads back to itself", "repair the decorator that sets it"
        ) from error
    return _rewritten(function, call, name)


def _rewritten(function: Callable[..., Any], call: OperationCall, name: str) -> Rewritten:
    plain = plain_function(function, name)
    inner = plain.__dict__.get("__wrapped__")
    if inner is None:
        return _instrumented(plain, call, name)
    rewritten = _rewritten(inner, call, name)
    replacement: Callable[..., Any] = rewritten.function
    if isinstance(inner, MethodType):
        replacement = MethodType(replacement, inner.__self__)
    return dataclasses.replace(rewritten, function=with_inner(plain, inner, replacement, name))


def _instrumented(function: FunctionType, call: OperationCall, name: str) -> Rewritten:
    definition = find_definition(function, name)
    source = definition.dedented()
    operations = mark_operations(definition, name)
    extra_free = (OPERATION_NAME,) if operations else ()
    code = compile_definition(definition, function.__code__, extra_free)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[OPERATION_NAME] = CellType(_through(call))
    return Rewritten(
        function=like(function, code, tuple(cells[free] for free in code.co_freevars)),
        operations=operations,
        source=source,
        first_line=definition.first_line,
        filename=code.co_filename,
    )


def _through(call: OperationCall) -> Callable[..., Any]:
    """Return the function that instrumented code calls; positional-only, to accept any keyword arguments."""

    def operation(name: str, callee: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return call(name, callee, args, kwargs)

    return operation
