"""Decorated functions: the innermost body is rewritten, and copies of its wrappers run it.

A copy gets another function in its closure; the wrapper itself, which other modules share, is not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from nnsight_engine.envoys.source.errors import SourceNotAvailableError

_COMPILED = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)


def plain_function(function: Callable[..., Any], name: str) -> FunctionType:
    """Return the function of a function or bound method; SourceNotAvailableError for other callables."""
    found = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(found, FunctionType):
        return found
    if isinstance(found, torch.nn.Module):
        raise SourceNotAvailableError(
            name,
            f"it is a module, {type(found).__name__}",
            "use `.source` of the module's own envoy",
        )
    if isinstance(found, _COMPILED):
        raise SourceNotAvailableError(
            name, f"{found!r} is not written in Python", "read its inputs and its output instead"
        )
    if isinstance(found, functools.partial):
        raise SourceNotAvailableError(
            name, f"it is a functools.partial of {found.func!r}", "ask for the source of that function"
        )
    raise SourceNotAvailableError(
        name,
        f"it is of type {type(found).__name__}; only functions and methods written in Python have them",
        "read its inputs and its output instead",
    )


def with_inner(wrapper: FunctionType, inner: object, replacement: object, name: str) -> FunctionType:
    """Return a copy of a wrapper with another function in its closure and as ``__wrapped__``."""
    cells = wrapper.__closure__ or ()
    held = [_content(cell) is inner for cell in cells]
    if not any(held):
        raise SourceNotAvailableError(
            name,
            f"its decorator {wrapper.__code__.co_qualname} does not reach the function by its closure",
            "decorate with a closure over the function, or leave the decorator out",
        )
    replaced = tuple(
        CellType(replacement) if holds else cell for cell, holds in zip(cells, held, strict=True)
    )
    copy = like(wrapper, wrapper.__code__, replaced)
    copy.__dict__["__wrapped__"] = replacement
    return copy


def like(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = None if function.__kwdefaults__ is None else dict(function.__kwdefaults__)
    functools.update_wrapper(made, function)
    del made.__dict__["__wrapped__"]
    if "__wrapped__" in function.__dict__:
        made.__dict__["__wrapped__"] = function.__dict__["__wrapped__"]
    return made


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None
