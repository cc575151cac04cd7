"""Rewriting of a block's assignments to shared variables, so that each one is counted.

A cell does not show whether the block has assigned the same object again, as invokes need to know. So ``x =
y`` becomes an assignment to ``__nnsight_own__["x"]``, an ``Assignments``, which sets the cell and counts.
Where syntax requires a plain name (an import, ``def``, ``+=``, ``except … as``, a pattern), a call after it
counts.

A class's own variables are not shared. A function's variables are shared where it declares them ``nonlocal``,
and where a trace may stand in the function: such a function creates an ``Assignments`` of its own, per call.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from nnsight_engine.tracing.block_names import bound_in, declared_nonlocal, stored_in

BIND = "__nnsight_bind__"
"""The helper that is called for each ``with`` statement of a block, see ``blocks``."""
OWN = "__nnsight_own__"
"""The name of the ``Assignments`` in a block's code."""

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def count_stores(
    body: Sequence[ast.stmt], names: frozenset[str], spell: Callable[[str], str]
) -> list[ast.stmt]:
    """Return the statements with assignments counted; ``body`` is changed, except for classes in it."""
    counter = _Counter(names, spell)
    found: list[ast.stmt] = []
    for statement in body:
        visited = counter.visit(statement)
        found += visited if isinstance(visited, list) else [visited]
    return found


class _Counter(ast.NodeTransformer):
    def __init__(self, names: frozenset[str], spell: Callable[[str], str]) -> None:
        self._counted = names
        """Names that an assignment in the current scope shares with the surroundings."""
        self._within_reach = names
        """Names that ``nonlocal`` in a function here would share with the surroundings."""
        self._spell = spell
        self._own = OWN
        """The name of the current scope's ``Assignments``."""
        self._numbers = itertools.count(1)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) or node.id not in self._counted:
            return node
        key = ast.Constant(value=self._spell(node.id))
        return _at(node, ast.Subscript(value=self._assignments(), slice=key, ctx=node.ctx))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        """Assign with a call, since ``:=`` accepts plain names only."""
        node.value = self.visit(node.value)
        if node.target.id not in self._counted:
            return node
        return _at(node, self._call("assign", [ast.Constant(value=self._spell(node.target.id)), node.value]))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        node.value = self.visit(node.value)
        if not isinstance(node.target, ast.Name):
            node.target = self.visit(node.target)
            return node
        return [node, *self._counts(node, [node.target.id])]

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> Any:
        names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        return [node, *self._counts(node, names)]

    visit_ImportFrom = visit_Import  # noqa: N815 - ast's name

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        """Count at the beginning of the handler; at its end Python deletes the name."""
        counts = self._counts(node.body[0], [node.name] if node.name else [])
        self.generic_visit(node)
        node.body = [*counts, *node.body]
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        """Count before the guard, where the pattern's names have been assigned."""
        captured = [
            name
            for part in ast.walk(node.pattern)
            for name in (getattr(part, "name", None), getattr(part, "rest", None))
            if isinstance(name, str) and name in self._counted
        ]
        self.generic_visit(node)
        if captured:
            counts: ast.expr = self._count(captured)
            if node.guard is not None:
                counts = ast.BoolOp(op=ast.And(), values=[counts, node.guard])
            node.guard = _at(node.pattern, counts)
        return node

    def visit_FunctionDef(self, node: Function) -> Any:
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        node.args = self.visit(node.args)
        shared = declared_nonlocal(node.body)
        arguments = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        bound = bound_in(node.body)
        lent = _lent_in(node.body) & (stored_in(node.body) | bound) & (bound | arguments)
        reach = (self._within_reach - bound - arguments) | lent
        outside = self._own
        if lent:
            self._own = f"{OWN.rstrip('_')}_{next(self._numbers)}__"
        self._in_scope(node, (shared & self._within_reach) | lent, reach)
        if lent:
            at = _after_docstring(node.body)
            node.body[at:at] = self._lending(node, outside, lent, bound)
            self._own = outside
        return [node, *self._counts(node, [node.name])]

    def _lending(
        self, node: Function, outside: str, lent: frozenset[str], bound: frozenset[str]
    ) -> list[ast.stmt]:
        """Return the statements at a function's begin that have its own variables counted."""
        names = sorted(lent)
        elements: list[ast.expr] = [ast.Name(id=name, ctx=ast.Load()) for name in names]
        capture = ast.Lambda(
            args=ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]),
            body=ast.Tuple(elts=elements, ctx=ast.Load()),
        )
        call = ast.Call(
            func=ast.Attribute(value=ast.Name(id=outside, ctx=ast.Load()), attr="lent", ctx=ast.Load()),
            args=[capture],
            keywords=[],
        )
        begin = ast.Assign(targets=[ast.Name(id=self._own, ctx=ast.Store())], value=call)
        targets: list[ast.expr] = [ast.Name(id=name, ctx=ast.Store()) for name in names if name in bound]
        if not targets:
            return [_at(node, begin)]
        # Never run: it makes the names local to the function, since no other statement assigns them any
        # more.
        owned = ast.Assign(targets=targets, value=ast.Constant(value=None))
        never = ast.If(test=ast.Constant(value=False), body=[owned], orelse=[])
        return [_at(node, begin), _at(node, never)]

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's name

    def visit_TypeAlias(self, node: Any) -> Any:
        return [node, *self._counts(node, [node.name.id])]

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """Count the class's name; names in its body are attributes, which functions in it do not see."""
        node = copy.deepcopy(node)
        for given in (node.decorator_list, node.bases, node.keywords):
            given[:] = [self.visit(one) for one in given]
        shared = declared_nonlocal(node.body)
        self._in_scope(node, shared & self._within_reach, self._within_reach)
        return [node, *self._counts(node, [node.name])]

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        node.args = self.visit(node.args)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.iter = self.visit(node.iter)
        node.ifs = [self.visit(test) for test in node.ifs]
        return node

    def _in_scope(
        self, node: Function | ast.ClassDef, counted: frozenset[str], within_reach: frozenset[str]
    ) -> None:
        outside = self._counted, self._within_reach
        self._counted, self._within_reach = counted, within_reach
        try:
            body: list[ast.stmt] = []
            for statement in node.body:
                visited = self.visit(statement)
                body += visited if isinstance(visited, list) else [visited]
            node.body = body
        finally:
            self._counted, self._within_reach = outside

    def _counts(self, node: ast.stmt, names: Iterable[str]) -> list[ast.stmt]:
        counted = [name for name in names if name in self._counted]
        return [_at(node, ast.Expr(value=self._count(counted)))] if counted else []

    def _assignments(self) -> ast.Name:
        return ast.Name(id=self._own, ctx=ast.Load())

    def _call(self, method: str, arguments: list[ast.expr]) -> ast.Call:
        called = ast.Attribute(value=self._assignments(), attr=method, ctx=ast.Load())
        return ast.Call(func=called, args=arguments, keywords=[])

    def _count(self, names: Sequence[str]) -> ast.Call:
        return self._call("count", [ast.Constant(value=self._spell(name)) for name in names])


def _lent_in(body: Sequence[ast.stmt]) -> frozenset[str]:
    """Return the names that rewritten ``with`` statements capture for nested traces, see ``blocks``."""
    captures = [
        node.args[0]
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == BIND
    ]
    return frozenset(
        name.id for capture in captures for name in ast.walk(capture) if isinstance(name, ast.Name)
    )


def _after_docstring(body: Sequence[ast.stmt]) -> int:
    match body[0]:
        case ast.Expr(value=ast.Constant(value=str())):
            return 1
    return 0


def _at(place: ast.AST, made: Node) -> Node:
    for child in ast.walk(made):
        if isinstance(child, ast.stmt | ast.expr) and not hasattr(child, "lineno"):
            ast.copy_location(child, place)
    return made
