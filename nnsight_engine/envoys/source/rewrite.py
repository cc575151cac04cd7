"""Rewrites a function so that each of its calls goes through a callback.

``f(a, *b, c=d)`` becomes ``operation("f_0", f, a, *b, c=d)``: Python itself still evaluates the callee first
and the arguments after it, and checks them. Calls that inspect their caller's frame are left unchanged.
Positions are the original's, so errors show its source.

Invariant: with a ``call`` that only makes the call, the rewritten function behaves as the original, whose
globals and closure cells are shared and not changed. Of a decorated function the innermost body is rewritten,
and copies of its wrappers run it; the wrappers, which other modules share, are not changed.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
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
from typing import Any, TypeVar, cast

import torch

from nnsight_engine.core.closure_cells import content
from nnsight_engine.envoys.source.definition import (
    Definition,
    Operation,
    OperationCall,
    Rewritten,
    SourceNotAvailableError,
    compile_definition,
    find_definition,
)

_COMPILED = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)


def plain_function(function: Callable[..., Any], name: str) -> FunctionType:
    """Return the function of a function or bound method; SourceNotAvailableError for other callables."""
    plain = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(plain, FunctionType):
        return plain
    if isinstance(plain, torch.nn.Module):
        raise SourceNotAvailableError(
            name,
            f"it is a module, {type(plain).__name__}",
            "use `.source` of the module's own envoy",
        )
    if isinstance(plain, _COMPILED):
        raise SourceNotAvailableError(
            name, f"{plain!r} is not written in Python", "read its inputs and its output instead"
        )
    if isinstance(plain, functools.partial):
        raise SourceNotAvailableError(
            name, f"it is a functools.partial of {plain.func!r}", "ask for the source of that function"
        )
    raise SourceNotAvailableError(
        name,
        f"it is of type {type(plain).__name__}; only functions and methods written in Python have them",
        "read its inputs and its output instead",
    )


def with_inner(wrapper: FunctionType, inner: object, replacement: object, name: str) -> FunctionType:
    """Return a copy of a wrapper with another function in its closure and as ``__wrapped__``."""
    cells = wrapper.__closure__ or ()
    holds_inner = [content(cell) is inner for cell in cells]
    if not any(holds_inner):
        raise SourceNotAvailableError(
            name,
            f"its decorator {wrapper.__code__.co_qualname} does not reach the function by its closure",
            "decorate with a closure over the function, or leave the decorator out",
        )
    replaced = tuple(
        CellType(replacement) if holds else cell for cell, holds in zip(cells, holds_inner, strict=True)
    )
    copy = like(wrapper, wrapper.__code__, replaced)
    copy.__dict__["__wrapped__"] = replacement
    return copy


def like(function: FunctionType, code: CodeType, closure: tuple[CellType, ...]) -> FunctionType:
    """Return a function with other code and cells, the rest like ``function``, which it does not wrap."""
    new_function = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    new_function.__kwdefaults__ = None if function.__kwdefaults__ is None else dict(function.__kwdefaults__)
    functools.update_wrapper(new_function, function)
    del new_function.__dict__["__wrapped__"]
    if "__wrapped__" in function.__dict__:
        new_function.__dict__["__wrapped__"] = function.__dict__["__wrapped__"]
    return new_function


NodeT = TypeVar("NodeT", bound=ast.AST)

OPERATION_NAME = "@operation"
"""The free variable through which operations are called; not an identifier, so no name can collide."""

_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

_FRAME_READERS = frozenset({"super", "globals", "eval", "exec", "breakpoint", "_getframe", "currentframe"})

_VARIABLE_READERS = frozenset({"locals", "vars", "dir"})

_EVALUATION_ORDER: dict[type[ast.AST], tuple[str, ...]] = {
    # Nodes whose fields are declared in another order. Annotations in functions are not evaluated.
    ast.Assign: ("value", "targets"),
    ast.AnnAssign: ("value", "target"),
    ast.For: ("iter", "target", "body", "orelse"),
    ast.AsyncFor: ("iter", "target", "body", "orelse"),
    ast.ListComp: ("generators", "elt"),
    ast.SetComp: ("generators", "elt"),
    ast.GeneratorExp: ("generators", "elt"),
    ast.DictComp: ("generators", "key", "value"),
    ast.comprehension: ("iter", "target", "ifs"),
    # Before 3.12, expressions in f-strings have no correct position in the file.
    ast.JoinedStr: (),
}


def mark_operations(definition: Definition, name: str) -> tuple[Operation, ...]:
    """Instrument a function's own calls, in place, and return them in the order of evaluation.

    Calls in comprehensions are included; those in nested functions, lambdas and classes, in decorators,
    defaults, annotations and f-strings are not. SourceNotAvailableError if the function lists its own
    variables, which would include ours.
    """
    marker = _Marker(definition, name)
    for index, statement in enumerate(definition.node.body):
        definition.node.body[index] = marker.marked(statement)
    return tuple(marker.operations)


class _Marker:
    """Replaces calls by operations in a syntax tree, and lists them; see ``mark_operations``."""

    def __init__(self, definition: Definition, name: str) -> None:
        """Prepare to mark the calls of ``definition``; ``name`` is the function's name in errors."""
        self._definition = definition
        self._name = name
        self._counts: collections.Counter[str] = collections.Counter()
        self.operations: list[Operation] = []

    def marked(self, node: NodeT) -> NodeT:
        """Instrument the calls in a node, in place; return the node, or what takes its place."""
        if isinstance(node, _OWN_SCOPE):
            return node
        if isinstance(node, ast.Call):
            return cast("NodeT", self._marked_call(node))
        if isinstance(node, ast.Dict):
            self._mark_dict(node)
        else:
            self._mark_fields(node, _EVALUATION_ORDER.get(type(node), node._fields))
        return node

    def _mark_fields(self, node: ast.AST, fields: Iterable[str]) -> None:
        """Mark the nodes in the given fields of a node, in this order."""
        for field in fields:
            value = getattr(node, field)
            if isinstance(value, ast.AST):
                setattr(node, field, self.marked(value))
            elif isinstance(value, list):
                value[:] = [self.marked(item) if isinstance(item, ast.AST) else item for item in value]

    def _mark_dict(self, node: ast.Dict) -> None:
        for index, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            node.keys[index] = None if key is None else self.marked(key)
            node.values[index] = self.marked(value)

    def _marked_call(self, node: ast.Call) -> ast.Call:
        """Return the call of an operation in place of a call, unless that reads the caller's frame."""
        text = self._definition.text_of(node)
        callee_name = _callee_name(node.func)  # before the calls in it are replaced
        self._mark_fields(node, node._fields)
        if self._reads_frame(node):
            return node
        name = f"{callee_name}_{self._counts[callee_name]}"
        self._counts[callee_name] += 1
        first_line = self._definition.first_line
        line, end_line = _end_line(node.func), _end_line(node)
        self.operations.append(Operation(name, line - first_line, end_line - first_line, text))
        operation = ast.Name(OPERATION_NAME, ast.Load())
        call = ast.Call(operation, [ast.Constant(name), node.func, *node.args], node.keywords)
        return ast.fix_missing_locations(_at_callee(call, node))

    def _reads_frame(self, node: ast.Call) -> bool:
        """Return whether a call needs the function's own frame; raise if it lists the variables."""
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in _FRAME_READERS
        if not isinstance(node.func, ast.Name):
            return False
        if node.func.id == "locals" or (node.func.id in _VARIABLE_READERS and not node.args):
            raise SourceNotAvailableError(
                self._name,
                f"it calls {node.func.id}(), which would show the variable that operations go through",
                "name the variables in the function instead",
            )
        return node.func.id in _FRAME_READERS


def _end_line(node: ast.expr) -> int:
    return node.end_lineno or node.lineno


def _at_callee(call: ast.Call, node: ast.Call) -> ast.Call:
    """Set the position of a call to Python's own: for a chain over several lines, the method's name."""
    ast.copy_location(call, node)
    method = node.func
    if isinstance(method, ast.Attribute) and method.lineno != _end_line(method):
        call.lineno = _end_line(method)
        call.col_offset = (method.end_col_offset or 0) - len(method.attr.encode())
    return call


def _callee_name(callee: ast.expr) -> str:
    """Return a callee's name: ``self_c_proj``; the part before the last link that has no name is omitted."""
    attributes: list[str] = []
    while isinstance(callee, ast.Attribute):
        attributes.append(callee.attr)
        callee = callee.value
    if isinstance(callee, ast.Name):
        attributes.append(callee.id)
    elif isinstance(callee, ast.Call) and isinstance(callee.func, ast.Name) and callee.func.id == "super":
        attributes.append("super")
    elif not attributes:
        return _nameless_part(callee)
    return "_".join(reversed(attributes))


def _nameless_part(callee: ast.expr) -> str:
    """Return a name for a callee that is an item or a result, by what it comes from."""
    if isinstance(callee, ast.Subscript):
        return _callee_name(callee.value)
    if isinstance(callee, ast.Call):
        return f"{_callee_name(callee.func)}_call"
    return "call"


def rewrite(function: Callable[..., Any], call: OperationCall, name: str) -> Rewritten:
    """Rewrite a function so that its calls go through ``call``; of a decorated one, its innermost body's."""
    try:
        inspect.unwrap(function)
    except ValueError as error:
        raise SourceNotAvailableError(
            name, "its __wrapped__ leads back to itself", "repair the decorator that sets it"
        ) from error
    return _rewritten(function, call, name)


def _rewritten(function: Callable[..., Any], call: OperationCall, name: str) -> Rewritten:
    """Rewrite the innermost function, and copy each wrapper around it to call the rewritten one."""
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
    """Rewrite a function that wraps no other one."""
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
