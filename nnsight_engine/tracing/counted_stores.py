"""A block's stores to its shared variables, rewritten so that each one is counted.

A cell tells what a variable holds, and not whether the block has assigned it: it may have assigned the very
object that was there. Invokes, which pass their variables on, have to know. So a store to ``x`` becomes one
to ``__nnsight_own__["x"]``, an ``Assignments``, which fills the cell and counts. Where Python's syntax wants
a plain name (an import, a ``def``, ``+=``, ``except … as``, a pattern), a call after it counts.

Reads are left alone. Classes' own variables are not shared; a function's are, where it says ``nonlocal``.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from nnsight_engine.tracing.block_names import declared_nonlocal, stored_in

OWN = "__nnsight_own__"
"""What the code calls its ``Assignments``."""

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def count_stores(
    body: Sequence[ast.stmt], names: frozenset[str], spell: Callable[[str], str]
) -> list[ast.stmt]:
    """Return the statements with their stores to shared variables counted.

    Args:
        body: The statements of a block, rewritten, which are changed; classes in it are copied first.
        names: The shared variables, as they are written.
        spell: Gives a name as the compiler spells it, see ``block_names.mangled``.
    """
    counter = _Counter(names, spell)
    found: list[ast.stmt] = []
    for statement in body:
        visited = counter.visit(statement)
        found += visited if isinstance(visited, list) else [visited]
    return found


class _Counter(ast.NodeTransformer):
    """Rewrites the stores of one scope, and of the scopes in it."""

    def __init__(self, names: frozenset[str], spell: Callable[[str], str]) -> None:
        self._counted = names
        """Names that a store in the current scope shares with the surroundings."""
        self._within_reach = names
        """Names that ``nonlocal`` in a function here would share with the surroundings."""
        self._spell = spell

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Store to, or delete, the counted variable."""
        if isinstance(node.ctx, ast.Load) or node.id not in self._counted:
            return node
        key = ast.Constant(value=self._spell(node.id))
        return _at(node, ast.Subscript(value=_own(), slice=key, ctx=node.ctx))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        """Assign by a call: ``:=`` takes plain names only."""
        node.value = self.visit(node.value)
        if node.target.id not in self._counted:
            return node
        return _at(node, _call("assign", [ast.Constant(value=self._spell(node.target.id)), node.value]))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        """Count after the store, which also reads."""
        node.value = self.visit(node.value)
        if not isinstance(node.target, ast.Name):
            node.target = self.visit(node.target)
            return node
        return [node, *self._counts(node, [node.target.id])]

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> Any:
        """Count after the store."""
        names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        return [node, *self._counts(node, names)]

    visit_ImportFrom = visit_Import  # noqa: N815 - ast's name

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        """Count where the handler begins; at its end Python deletes the name."""
        counts = self._counts(node.body[0], [node.name] if node.name else [])
        self.generic_visit(node)
        node.body = [*counts, *node.body]
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        """Count before the guard, which is where a pattern's names have been stored."""
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
        """Count the function's name, and what it stores to as ``nonlocal``."""
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        node.args = self.visit(node.args)
        shared = declared_nonlocal(node.body)
        own = (stored_in(node.body) - shared) | {
            one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)
        }
        self._in_scope(node, shared & self._within_reach, self._within_reach - own)
        return [node, *self._counts(node, [node.name])]

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - ast's name

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """Count the class's name; its body's names are attributes, which functions in it do not see."""
        node = copy.deepcopy(node)
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        shared = declared_nonlocal(node.body)
        self._in_scope(node, shared & self._within_reach, self._within_reach)
        return [node, *self._counts(node, [node.name])]

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        """A lambda's names are its own."""
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        """A comprehension's loop variables are its own."""
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
        """Return the statement that counts these names at the place of ``node``; none if none is shared."""
        counted = [name for name in names if name in self._counted]
        return [_at(node, ast.Expr(value=self._count(counted)))] if counted else []

    def _count(self, names: Sequence[str]) -> ast.Call:
        return _call("count", [ast.Constant(value=self._spell(name)) for name in names])


def _own() -> ast.Name:
    return ast.Name(id=OWN, ctx=ast.Load())


def _call(method: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(
        func=ast.Attribute(value=_own(), attr=method, ctx=ast.Load()), args=arguments, keywords=[]
    )


def _at(place: ast.AST, made: Node) -> Node:
    """Give a made node, and the made nodes in it, the place of another."""
    for child in ast.walk(made):
        if isinstance(child, ast.stmt | ast.expr) and not hasattr(child, "lineno"):
            ast.copy_location(child, place)
    return made


__all__ = ["OWN", "count_stores"]
