"""Deprecated names of nnsight, from before blocks were plain Python; each warns with its replacement.

Values in a block are real now, so each name stands for the plain object or function.
"""

from __future__ import annotations

import builtins
import contextlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def apply(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call ``function``."""
    _warn("apply(f, x)", "f(x)")
    return function(*args, **kwargs)


def trace(function: T) -> T:
    """Return ``function``: any function can be called in a block."""
    _warn("the decorator trace", "nothing in its place")
    return function


def local(function: Any = None) -> Any:
    """Return ``function``, or a context that does nothing: blocks run locally already."""
    _warn("local", "nothing in its place")
    return function if function is not None else contextlib.nullcontext()


def _warn(old: builtins.str, new: builtins.str) -> None:
    warnings.warn(f"{old} is deprecated: write {new}", DeprecationWarning, stacklevel=3)


def _plain(kind: type[T]) -> Callable[..., T]:
    """Return a function that makes a builtin type's value, and warns that the plain type does."""
    name = kind.__name__

    def make(*args: Any, **kwargs: Any) -> T:
        _warn(f"nnsight.{name}(...)", f"{name}(...) and save it")
        return kind(*args, **kwargs)

    make.__name__, make.__doc__ = name, f"Make a plain ``{name}``."
    return make


bool = _plain(builtins.bool)
bytes = _plain(builtins.bytes)
dict = _plain(builtins.dict)
float = _plain(builtins.float)
int = _plain(builtins.int)
list = _plain(builtins.list)
set = _plain(builtins.set)
str = _plain(builtins.str)
tuple = _plain(builtins.tuple)
