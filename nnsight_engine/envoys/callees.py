"""Determines the function that an operation calls, outside a trace, where the call is not running.

A callee that is reached from ``self``, the function's module or its closure is looked up. For one in a local
variable, the model is run on fake tensors, if it has an example input.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from nnsight_engine.core.trees import map_tensors
from nnsight_engine.envoys.tracers.interleaving import run_on_fakes
from nnsight_engine.interleaving.events import EarlyStopException, MissedProviderError
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.tracing.parsing import parse

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy

_NOTHING = object()


def callee_of_text(function: Callable[..., Any], text: str) -> Callable[..., Any] | None:
    """Return the callee of the call expression ``text`` in ``function``; None if only a run determines it."""
    statement = parse(text).body[0]
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    names: list[str] = []
    node = statement.value.func
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    found = _variable(function, node.id)
    for name in reversed(names):
        found = getattr(found, name, _NOTHING)  # an attribute of a module, a class or a namespace
    return found if callable(found) else None


def _variable(function: Callable[..., Any], name: str) -> Any:
    bound_to = getattr(function, "__self__", None)
    plain = function.__func__ if isinstance(function, MethodType) else function
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    if not isinstance(plain, FunctionType):
        return _NOTHING
    code = plain.__code__
    if name in code.co_varnames or name in code.co_cellvars:
        is_self = bound_to is not None and code.co_argcount and name == code.co_varnames[0]
        return bound_to if is_self else _NOTHING
    known = inspect.getclosurevars(plain)
    if name in code.co_freevars:
        return known.nonlocals.get(name, _NOTHING)
    return plain.__globals__.get(name, getattr(builtins, name, _NOTHING))


def find_by_running(model: Envoy, request: Callable[[], Any]) -> bool:
    """Run the model on fake tensors until ``request`` gets its value; return whether it did."""
    example = model._example_input()
    if example is None:
        return False

    def block() -> None:
        request()
        raise EarlyStopException

    interleaver = model._interleaver
    with interleaver.exclusive:
        interleaver.initialize([Mediator(block)])
        try:
            run_on_fakes(
                lambda converted: model.interleave(model._run_module, **map_tensors(example, converted))
            )
        except MissedProviderError:
            return False
        finally:
            interleaver.forget()
    return True
