"""Transforms call expressions of a syntax tree into operations.

``f(a, *b, c=d)`` becomes ``operation("f_0", f, a, *b, c=d)``: Python itself still evaluates the callee first
and the arguments after it, and checks them. Calls that inspect their caller's frame are left unchanged.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterable
from typing import TypeVar, cast

from nnsight_engine.envoys.source.definition import Definition
from nnsight_engine.envoys.source.errors import SourceNotAvailableError
from nnsight_engine.envoys.source.operations import Operation

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
    def __init__(self, definition: Definition, name: str) -> None:
        self._definition = definition
        self._name = name
        self._counts: collections.Counter[str] = collections.Counter()
        self.operations: list[Operation] = []

    def marked(self, node: NodeT) -> NodeT:
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
        text = self._definition.text_of(node)
        callee_name = _callee_name(node.func)  # before the calls in it are replaced
        self._mark_fields(node, node._fields)
        if self._reads_frame(node):
            return node
        name = f"{callee_name}_{self._counts[callee_name]}"
        self._counts[callee_name] += 1
        first = self._definition.first_line
        line, end_line = _end_line(node.func), _end_line(node)
        self.operations.append(Operation(name, line - first, end_line - first, text))
        through = ast.Name(OPERATION_NAME, ast.Load())
        call = ast.Call(through, [ast.Constant(name), node.func, *node.args], node.keywords)
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
    if isinstance(callee, ast.Subscript):
        return _callee_name(callee.value)
    if isinstance(callee, ast.Call):
        return f"{_callee_name(callee.func)}_call"
    return "call"
