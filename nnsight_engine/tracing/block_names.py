"""Names that the statements of a block mention and assign, and statements that would leave the block."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def names_in(body: Sequence[ast.stmt]) -> frozenset[str]:
    """Return every name that the statements mention, nested functions included."""
    names: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.Nonlocal):
                names.update(node.names)
            elif isinstance(node, ast.Call) and is_bare_super(node):
                names.add("__class__")
    return frozenset(names | stored_in(body))


def mangled(names: frozenset[str], class_name: str | None) -> frozenset[str]:
    """Return the names with the compiler's name mangling within ``class_name``: ``__x`` becomes ``_C__x``."""
    return frozenset(mangled_name(class_name, name) for name in names)


def mangled_name(class_name: str | None, name: str) -> str:
    prefix = (class_name or "").lstrip("_")
    private = prefix and name.startswith("__") and not name.endswith("__")
    return f"_{prefix}{name}" if private else name


def is_bare_super(node: ast.Call) -> bool:
    """Return whether a call is ``super()``, which implies arguments of the surrounding function."""
    return isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and not node.keywords


def names_outside(node: ast.With, body: Sequence[ast.stmt]) -> frozenset[str]:
    """Return the names that statements mention outside of ``node``, and all names of the loops around it."""
    visitor = _OutsideNames(node)
    for statement in body:
        visitor.visit(statement)
    return frozenset(visitor.names)


def stored_in(body: Sequence[ast.stmt]) -> frozenset[str]:
    """Return the names that statements assign in their own scope."""
    scope = _scan(body)
    return frozenset((scope.stored | scope.from_functions) - scope.global_)


def bound_in(body: Sequence[ast.stmt]) -> frozenset[str]:
    """Return the names that are local to a function because the statements of its body bind them."""
    scope = _scan(body)
    return frozenset(scope.stored - scope.nonlocal_ - scope.global_)


def declared_nonlocal(body: Sequence[ast.stmt]) -> frozenset[str]:
    return frozenset(_scan(body).nonlocal_)


def leaving(body: Sequence[ast.stmt]) -> list[ast.AST]:
    """Return the nodes that would leave the function around the statements."""
    return _scan(body).leaving


class _OutsideNames(ast.NodeVisitor):
    def __init__(self, node: ast.With) -> None:
        self._with_position = (node.lineno, node.col_offset)
        self._is_inside = False
        self.names: set[str] = set()

    def visit(self, node: ast.AST) -> None:
        """Collect names outside of the statement; a loop around it runs again, so all its names count."""
        if isinstance(node, ast.With) and (node.lineno, node.col_offset) == self._with_position:
            self._is_inside = True
            return
        if isinstance(node, ast.For | ast.While):
            outside, self._is_inside = self._is_inside, False
            self.generic_visit(node)
            if self._is_inside:
                self.names |= names_in([node])
            self._is_inside |= outside
            return
        if isinstance(node, ast.Name):
            self.names.add(node.id)
        self.generic_visit(node)


class _Scope(ast.NodeVisitor):
    """Names assigned in one function scope, also by nested functions, and statements that would leave it."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.from_functions: set[str] = set()
        self.global_: set[str] = set()
        self.nonlocal_: set[str] = set()
        self.leaving: list[ast.AST] = []

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.stored.add(node.id)

    def visit_Global(self, node: ast.Global) -> None:
        self.global_.update(node.names)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.stored.update(node.names)
        self.nonlocal_.update(node.names)

    def visit_alias(self, node: ast.alias) -> None:
        self.stored.add(node.asname or node.name.partition(".")[0])

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.stored.add(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self.stored.add(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self.stored.add(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.stored.add(node.rest)
        self.generic_visit(node)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        """Add a definition's name, and the outer names that functions in it assign."""
        self.stored.add(node.name)
        for decorator in node.decorator_list:
            self.visit(decorator)
        if isinstance(node, ast.ClassDef):
            for argument in (*node.bases, *node.keywords):
                self.visit(argument)
        else:
            self.generic_visit(node.args)
        inner = _scan(node.body)
        bound = inner.stored - inner.nonlocal_
        if isinstance(node, ast.ClassDef):
            bound = set()  # functions in a class do not see its names
        else:
            bound |= {
                argument_node.arg
                for argument_node in ast.walk(node.args)
                if isinstance(argument_node, ast.arg)
            }
        self.from_functions |= inner.nonlocal_ | (inner.from_functions - bound)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _definition  # noqa: N815 - ast's names

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.generic_visit(node.args)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        """Add names bound by ``:=``, which belong to the function; other targets do not."""
        for child in ast.walk(node):
            if isinstance(child, ast.NamedExpr):
                self.stored.add(child.target.id)
            elif isinstance(child, ast.Await) or (isinstance(child, ast.comprehension) and child.is_async):
                self.leaving.append(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    def _leaves(self, node: ast.AST) -> None:
        self.leaving.append(node)

    visit_Return = visit_Yield = visit_YieldFrom = visit_Await = _leaves  # noqa: N815
    visit_AsyncFor = visit_AsyncWith = _leaves  # noqa: N815


def _scan(body: Sequence[ast.stmt]) -> _Scope:
    """Return the names that the statements of one scope assign, see ``_Scope``."""
    scope = _Scope()
    for statement in body:
        scope.visit(statement)
    return scope
