"""Turns call expressions of a syntax tree into operations.

``f(a, *b, c=d)`` becomes ``operation("f_0", f, a, *b, c=d)``: Python itself still evaluates the
callee first and the arguments after it, in its own order, and checks them as it always does.
Calls that look at the frame they are in are left as they are. ``rewrite`` is the caller.
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
"""The free variable that operations go through; no identifier, so that it meets none."""

_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

_FRAME_READERS = frozenset({"super", "globals", "eval", "exec", "breakpoint", "_getframe", "currentframe"})

_VARIABLE_READERS = frozenset({"locals", "vars", "dir"})

_EVALUATION_ORDER: dict[type[ast.AST], tuple[str, ...]] = {
    # Those whose fields are declared in another order. Annotations in functions are not evaluated.
    ast.Assign: ("value", "targets"),
    ast.AnnAssign: ("value", "target"),
    ast.For: ("iter", "target", "body", "orelse"),
    ast.AsyncFor: ("iter", "target", "body", "orelse"),
    ast.ListComp: ("generators", "elt"),
    ast.SetComp: ("generators", "elt"),
    ast.GeneratorExp: ("generators", "elt"),
    ast.DictComp: ("generators", "key", "value"),
    ast.comprehension: ("iter", "target", "ifs"),
    # Before 3.12 expressions in f-strings have no proper place in the file.
    ast.JoinedStr: (),
}


def mark_operations(definition: Definition, name: str) -> tuple[Operation, ...]:
    """Instrument a function's own calls, in place, and list them in the order of evaluation.

    Calls in comprehensions count; those in nested functions, lambdas and classes, in decorators,
    defaults, annotations and f-strings do not.

    Args:
        definition: The function's statement; its tree is changed.
        name: What the function is called in errors.

    Raises:
        SourceNotAvailableError: The function lists its own variables, among which it would find ours.
    """
    marker = _Marker(definition, name)
    for index, statement in enumerate(definition.node.body):
        definition.node.body[index] = marker.marked(statement)
    return tuple(marker.operations)


class _Marker:
    """Walks a body in the order of evaluation and numbers the operations that it finds."""

    def __init__(self, definition: Definition, name: str) -> None:
        self._definition = definition
        self._name = name
        self._counts: collections.Counter[str] = collections.Counter()
        self.operations: list[Operation] = []

    def marked(self, node: NodeT) -> NodeT:
        """Return a node with its calls instrumented; the node itself unless it is such a call."""
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
        """Mark keys and values in turns; a key is None where a mapping is unpacked."""
        for index, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            node.keys[index] = None if key is None else self.marked(key)
            node.values[index] = self.marked(value)

    def _marked_call(self, node: ast.Call) -> ast.Call:
        text = self._definition.text_of(node)
        callee_name = _callee_name(node.func)  # before what is in it becomes calls of ours
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
        """Tell if a call must be made from the function's own frame."""
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
    """Place a call where Python sees it: in a chain over several lines, at the method's name."""
    ast.copy_location(call, node)
    method = node.func
    if isinstance(method, ast.Attribute) and method.lineno != _end_line(method):
        call.lineno = _end_line(method)
        call.col_offset = (method.end_col_offset or 0) - len(method.attr.encode())
    return call


def _callee_name(callee: ast.expr) -> str:
    """Return a callee's name: ``self_c_proj``; what comes before the last odd link is left out."""
    attributes: list[str] = []
    while isinstance(callee, ast.Attribute):
        attributes.append(callee.attr)
        callee = callee.value
    if isinstance(callee, ast.Name):
        attributes.append(callee.id)
    elif isinstance(callee, ast.Call) and isinstance(callee.func, ast.Name) and callee.func.id == "super":
        attributes.append("super")
    elif not attributes:
        return _odd_name(callee)
    return "_".join(reversed(attributes))


def _odd_name(callee: ast.expr) -> str:
    if isinstance(callee, ast.Subscript):
        return _callee_name(callee.value)
    if isinstance(callee, ast.Call):
        return f"{_callee_name(callee.func)}_call"
    return "call"
