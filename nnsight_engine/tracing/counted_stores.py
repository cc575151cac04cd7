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
from nnsight_engine.tracing.source_text import parameters

BIND = "__nnsight_bind__"
"""The helper that is called for each ``with`` statement of a block, see ``blocks``."""
OWN = "__nnsight_own__"
"""The name of the ``Assignments`` in a block's code."""

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def load(name: str) -> ast.Name:
    return ast.Name(id=name, ctx=ast.Load())


def store(name: str) -> ast.Name:
    return ast.Name(id=name, ctx=ast.Store())


def call(function: ast.expr, *arguments: ast.expr) -> ast.Call:
    return ast.Call(func=function, args=list(arguments), keywords=[])


def attribute(owner: str, name: str) -> ast.Attribute:
    return ast.Attribute(value=load(owner), attr=name, ctx=ast.Load())


def capture_of(names: Iterable[str]) -> ast.Lambda:
    """Return a function that is never called: it captures the cells of variables."""
    return ast.Lambda(args=parameters([]), body=ast.Tuple(elts=list(map(load, names)), ctx=ast.Load()))


def located(made: Node, original: ast.AST) -> Node:
    """Give nodes without a position that of another one."""
    for child in ast.walk(made):
        if isinstance(child, ast.stmt | ast.expr | ast.excepthandler) and not hasattr(child, "lineno"):
            ast.copy_location(child, original)
    return made


def visited(visitor: ast.NodeVisitor, body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return what a visitor makes of statements, of each of which it may make several."""
    results: list[ast.stmt] = []
    for statement in body:
        result = visitor.visit(statement)
        results += result if isinstance(result, list) else [result]
    return results


def count_stores(
    body: Sequence[ast.stmt], names: frozenset[str], spell: Callable[[str], str]
) -> list[ast.stmt]:
    """Return the statements with assignments counted; ``body`` is changed, except for classes in it."""
    return visited(_Counter(names, spell), body)


class _Counter(ast.NodeTransformer):
    """Replaces assignments to shared variables by counted ones, see the module; ``spell`` mangles a name."""

    def __init__(self, names: frozenset[str], spell: Callable[[str], str]) -> None:
        self._counted = names
        """Names that an assignment in the current scope shares with the surroundings."""
        self._within_reach = names
        """Names that ``nonlocal`` in a function here would share with the surroundings."""
        self._spell = spell
        self._stores_name = OWN
        """The name of the current scope's ``Assignments``."""
        self._numbers = itertools.count(1)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Turn an assignment or deletion of a shared name into that of an item of the ``Assignments``."""
        if isinstance(node.ctx, ast.Load) or node.id not in self._counted:
            return node
        key = ast.Constant(value=self._spell(node.id))
        return located(ast.Subscript(value=load(self._stores_name), slice=key, ctx=node.ctx), node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        """Assign with a call, since ``:=`` accepts plain names only."""
        node.value = self.visit(node.value)
        if node.target.id not in self._counted:
            return node
        key = ast.Constant(value=self._spell(node.target.id))
        return located(call(attribute(self._stores_name, "assign"), key, node.value), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """Count ``x += y`` after the statement, whose target has to be a name."""
        node.value = self.visit(node.value)
        if not isinstance(node.target, ast.Name):
            node.target = self.visit(node.target)
            return node
        return [node, *self._counts(node, [node.target.id])]

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> Any:
        """Count an import's names after the statement."""
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
            for pattern_node in ast.walk(node.pattern)
            for name in (getattr(pattern_node, "name", None), getattr(pattern_node, "rest", None))
            if isinstance(name, str) and name in self._counted
        ]
        self.generic_visit(node)
        if captured:
            counts: ast.expr = self._count(captured)
            if node.guard is not None:
                counts = ast.BoolOp(op=ast.And(), values=[counts, node.guard])
            node.guard = located(counts, node.pattern)
        return node

    def visit_FunctionDef(self, node: Function) -> Any:
        """Rewrite a function; one that may have traces in it gets an ``Assignments`` of its own."""
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        node.args = self.visit(node.args)
        shared = declared_nonlocal(node.body)
        arguments = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        bound = bound_in(node.body)
        lent = _lent_in(node.body) & (stored_in(node.body) | bound) & (bound | arguments)
        reach = (self._within_reach - bound - arguments) | lent
        outside = self._stores_name
        if lent:
            self._stores_name = f"{OWN.rstrip('_')}_{next(self._numbers)}__"
        self._in_scope(node, (shared & self._within_reach) | lent, reach)
        if lent:
            index = _after_docstring(node.body)
            node.body[index:index] = self._lending(node, outside, lent, bound)
            self._stores_name = outside
        return [node, *self._counts(node, [node.name])]

    def _lending(
        self, node: Function, outside: str, lent: frozenset[str], bound: frozenset[str]
    ) -> list[ast.stmt]:
        """Return the statements that create a function's ``Assignments`` for its ``lent`` variables."""
        capture = capture_of(sorted(lent))
        begin = ast.Assign(
            targets=[store(self._stores_name)], value=call(attribute(outside, "lent"), capture)
        )
        targets: list[ast.expr] = [store(name) for name in sorted(lent & bound)]
        if not targets:
            return [located(begin, node)]
        # Never run: it makes the names local to the function, since no other statement assigns them any
        # more.
        owned = ast.Assign(targets=targets, value=ast.Constant(value=None))
        never = ast.If(test=ast.Constant(value=False), body=[owned], orelse=[])
        return [located(begin, node), located(never, node)]

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's name

    def visit_TypeAlias(self, node: Any) -> Any:
        return [node, *self._counts(node, [node.name.id])]

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """Count the class's name; names in its body are attributes, which functions in it do not see."""
        node = copy.deepcopy(node)
        for expressions in (node.decorator_list, node.bases, node.keywords):
            expressions[:] = [self.visit(expression) for expression in expressions]
        shared = declared_nonlocal(node.body)
        self._in_scope(node, shared & self._within_reach, self._within_reach)
        return [node, *self._counts(node, [node.name])]

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        node.args = self.visit(node.args)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        """Leave the target out: it is a variable of the comprehension."""
        node.iter = self.visit(node.iter)
        node.ifs = [self.visit(test) for test in node.ifs]
        return node

    def _in_scope(
        self, node: Function | ast.ClassDef, counted: frozenset[str], within_reach: frozenset[str]
    ) -> None:
        """Rewrite the body of a function or class, in which other names are counted."""
        outside = self._counted, self._within_reach
        self._counted, self._within_reach = counted, within_reach
        try:
            node.body = visited(self, node.body)
        finally:
            self._counted, self._within_reach = outside

    def _counts(self, node: ast.stmt, names: Iterable[str]) -> list[ast.stmt]:
        counted = [name for name in names if name in self._counted]
        return [located(ast.Expr(value=self._count(counted)), node)] if counted else []

    def _count(self, names: Sequence[str]) -> ast.Call:
        keys = (ast.Constant(value=self._spell(name)) for name in names)
        return call(attribute(self._stores_name, "count"), *keys)


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
    """Return the index of the first statement after a docstring, 0 without one."""
    match body[0]:
        case ast.Expr(value=ast.Constant(value=str())):
            return 1
    return 0
