"""``.source``: the calls inside a module's forward, which is rewritten during traces, if it was requested.

Outside a trace, where no call is running, the function that an operation calls is looked up, if it is reached
from ``self``, the function's module or its closure. For one in a local variable, the model is run on fake
tensors, if it has an example input.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from nnsight_engine.core.saves import Place
from nnsight_engine.core.trees import map_tensors
from nnsight_engine.envoys.source.definition import (
    Operation,
    Rewritten,
    SourceNotAvailableError,
    format_operation,
    format_source,
)
from nnsight_engine.envoys.source.rewrite import rewrite
from nnsight_engine.envoys.tracers.interleaving import run_on_fakes
from nnsight_engine.envoys.values import CallValues
from nnsight_engine.interleaving.events import EarlyStopException, Events, MissedProviderError
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.tracing.source_text import parse

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
    callee = _variable(function, node.id)
    for name in reversed(names):
        callee = getattr(callee, name, _NOTHING)  # an attribute of a module, a class or a namespace
    return callee if callable(callee) else None


def _variable(function: Callable[..., Any], name: str) -> Any:
    """Return what a name in a function's code refers to; ``_NOTHING`` for what only a call determines."""
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
    closure = inspect.getclosurevars(plain)
    if name in code.co_freevars:
        return closure.nonlocals.get(name, _NOTHING)
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


class OperationEnvoy(CallValues, Place):
    """One call inside a function: its input, its output, and the calls inside its callee."""

    path: str | None

    def __init__(self, operation: Operation, holder: SourceEnvoy) -> None:
        """Create the envoy of one call in the function whose calls ``holder`` has."""
        self.operation = operation
        self.holder = holder
        self.path = f"{holder.path}.{operation.name}"
        self.interleaver: Interleaver = holder.interleaver

    @property
    def source(self) -> SourceEnvoy:
        """The calls inside the function that is called here.

        Inside a trace the function is known when the call is made. Outside, it is looked up, or determined by
        a run of the model on fake tensors.

        Raises:
            ValueError: The function is not known before the model has run it.
            SourceNotAvailableError: It is a module, or not written in Python.
        """
        holder, name = self.holder, self.operation.name
        known = holder.inner.get(name)
        if known is not None:
            return known
        mediator = self.interleaver.current
        if mediator is None:
            return self._looked_up()
        provider = f"{self.path}.fn"
        number = (mediator.interleaver or self.interleaver).call_number(provider)
        inner = self._known_as(mediator.send_event(Events.VALUE, provider, number))
        inner.count_from(self.interleaver.calls.get(f"{self.path}.input", 0))
        return inner

    def _looked_up(self) -> SourceEnvoy:
        """Find the function that is called without a running block: by its name, or by a run on fakes."""
        holder, name = self.holder, self.operation.name
        callee = callee_of_text(holder.original, self.operation.text)
        if callee is not None:
            return self._known_as(callee)
        if find_by_running(holder.model, lambda: self.source):
            return holder.inner[name]
        raise ValueError(
            f"Which function {self.path} calls is known once the model has run it: ask for its source "
            "inside a trace first."
        )

    def _known_as(self, callee: Callable[..., Any]) -> SourceEnvoy:
        inner = SourceEnvoy(str(self.path), callee, self.holder.model)
        self.holder.inner[self.operation.name] = inner
        return inner

    def __repr__(self) -> str:
        return format_operation(self.holder.rewritten, self.operation, self.holder.path)


class SourceEnvoy(Place):
    """The calls of one function, by name: ``source.self_c_proj_0``. Printing it shows their lines."""

    def __init__(self, path: str, function: Callable[..., Any], model: Envoy) -> None:
        """Rewrite a function; SourceNotAvailableError for a module, or if it cannot be rewritten."""
        if isinstance(function, torch.nn.Module):
            raise SourceNotAvailableError(
                path, "a module is called here", "ask the module itself: its own envoy has a .source"
            )
        self.path = path
        self.model = model
        self.interleaver: Interleaver = model._interleaver
        self.original = function
        self.inner: dict[str, SourceEnvoy] = {}
        self.rewritten: Rewritten = rewrite(function, self._run_operation, path)
        self.operations = {
            operation.name: OperationEnvoy(operation, self) for operation in self.rewritten.operations
        }

    def rebind(self, function: Callable[..., Any]) -> None:
        """Rewrite another function of the same kind in its place; calls that both make keep their envoys."""
        rewritten = rewrite(function, self._run_operation, self.path)
        previous_operations, self.original, self.rewritten = self.operations, function, rewritten
        self.operations = {}
        for operation in rewritten.operations:
            envoy = previous_operations.get(operation.name) or OperationEnvoy(operation, self)
            envoy.operation = operation
            self.operations[operation.name] = envoy

    def count_from(self, number: int) -> None:
        """Count calls from ``number`` on, if the function was called as often before it was rewritten."""
        calls = self.interleaver.calls
        ends = [f"{operation.path}.{end}" for operation in self for end in ("fn", "input", "output")]
        # Another stage of a pipeline rewrites it again, whose calls were seen.
        if number and calls.keys().isdisjoint(ends):
            calls.update(dict.fromkeys(ends, number))

    @property
    def function(self) -> Callable[..., Any]:
        """The rewritten function, bound to the same object as the original."""
        return self.bound_like(self.original)

    def _run_operation(
        self, name: str, callee: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make one of the function's calls; in the traced run, serve its values to blocks that wait."""
        interleaver = self.interleaver
        if get_ident() != interleaver.listener:
            return callee(*args, **kwargs)
        path = f"{self.path}.{name}"
        entrance, exit_, called = f"{path}.input", f"{path}.output", f"{path}.fn"
        calls, wanted = interleaver.calls, interleaver.wanted
        number = calls.get(entrance, 0)
        if called in wanted:
            interleaver.offer(called, number, callee)
        if entrance in wanted:
            args, kwargs = interleaver.offer(entrance, number, (args, kwargs))
        calls[called] = calls[entrance] = number + 1
        inner = self.inner.get(name)
        if inner is not None and _same_function(inner.original, callee):
            callee = inner.bound_like(callee)
        value = callee(*args, **kwargs)
        if exit_ in wanted:
            value = interleaver.offer(exit_, number, value)
        calls[exit_] = number + 1
        return value

    def bound_like(self, callee: Callable[..., Any]) -> Callable[..., Any]:
        """Return the rewritten function, bound to the object that ``callee`` is bound to, if any."""
        bound_to = getattr(callee, "__self__", None)
        return (
            MethodType(self.rewritten.function, bound_to) if bound_to is not None else self.rewritten.function
        )

    def __getattr__(self, name: str) -> OperationEnvoy:
        operations: dict[str, OperationEnvoy] = self.__dict__.get("operations", {})
        if name not in operations:
            raise AttributeError(
                f"{self.__dict__.get('path')} makes no call {name!r}; "
                f"it makes {', '.join(operations) or 'none'}",
                name=name,
                obj=self,
            )
        return operations[name]

    def __iter__(self) -> Iterator[OperationEnvoy]:
        """Iterate over the calls, in the order of evaluation."""
        return iter(self.operations.values())

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.operations})

    def __repr__(self) -> str:
        return format_source(self.rewritten)


def _same_function(function: Any, other: Any) -> bool:
    return getattr(function, "__func__", function) is getattr(other, "__func__", other)


class ForwardSource:
    """Installs a module's rewritten forward during a trace; accelerate's ``_old_forward`` is the real one."""

    def __init__(self, module: torch.nn.Module, path: str, model: Envoy) -> None:
        """Rewrite the forward of the module at ``path``; ``install`` and ``remove`` put it in and out."""
        self.module, self.name = module, _name_of_forward(module)
        self.source = SourceEnvoy(path, getattr(module, self.name), model)
        self._installed = False
        self._before: Any = None

    def rebind(self, module: torch.nn.Module) -> None:
        """Continue with another module of the same structure, such as one with loaded weights."""
        self.remove()
        name = _name_of_forward(module)
        self.source.rebind(getattr(module, name))
        self.module, self.name = module, name

    def install(self) -> bool:
        """Replace the forward; return whether it was not replaced already."""
        if self._installed:
            return False
        self._installed = True
        self._before = self.module.__dict__.get(self.name)
        self.module.__dict__[self.name] = self.source.function
        return True

    def remove(self) -> None:
        """Restore what was in place of the rewritten forward, if that is installed."""
        if not self._installed:
            return
        self._installed = False
        if self._before is None:
            del self.module.__dict__[self.name]
        else:
            self.module.__dict__[self.name] = self._before


def _name_of_forward(module: torch.nn.Module) -> str:
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"
