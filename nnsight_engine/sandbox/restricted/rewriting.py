"""Changes code so that it asks: every attribute, operator and loop goes through a guard (``names``).

Built on RestrictedPython's transformer, which lets no kind of syntax pass that it does not know. What
differs: its rules are those of templates, and blocks need ``h[:] *= 2``, ``self._x`` and ``nonlocal``. Guards
are called in the order in which Python would have done the same, since the values that blocks ask for come in
the model's order. Lines and columns stay those of the sender's file.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, Final, NoReturn, TypeVar

from RestrictedPython.transformer import INSPECT_ATTRIBUTES, RestrictingNodeTransformer

from nnsight_engine.sandbox.restricted import names
from nnsight_engine.serialization.errors import SandboxError
from nnsight_engine.tracing.blocks import Nested

Node = TypeVar("Node", bound=ast.AST)

_OPERATORS: Final[dict[type[ast.AST], str]] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitOr: "|", ast.BitXor: "^", ast.BitAnd: "&", ast.MatMult: "@",
    ast.USub: "-", ast.UAdd: "+", ast.Invert: "~", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=",
    ast.Gt: ">", ast.GtE: ">=", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_READABLE: Final = frozenset({"__name__"})
"""The one name of Python's own that may be read: of a class or a function."""

_SHORT: Final = 16
"""Items of a container that is written out and not counted: it is no larger than its text."""
_LOAD: Final = ast.Load()
_ENDING: Final = frozenset(
    {
        "BaseException",
        "BaseExceptionGroup",
        "ExceptionGroup",
        "GeneratorExit",
        "KeyboardInterrupt",
        "SystemExit",
    }
)
"""Errors that end code; it cannot raise or catch them."""


def restrict(node: Any, filename: str) -> None:
    """Change a function, a class, or the body of a traced ``with`` statement, in place.

    Raises:
        SandboxError: It says what the sandbox's Python does not have; the error names the line.
    """
    changing = _Restricting(filename)
    if isinstance(node, Nested):
        statement = node.node
        statement.items[node.item + 1 :] = [changing.visit(item) for item in statement.items[node.item + 1 :]]
        body = changing.statements(statement.body)
        statement.body = _ended(body) if node.item + 1 == len(statement.items) else body
    elif isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
        changing.definition(node)
    else:
        changing.refuse(node, "an `async` function")


def _ended(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a block's statements, which end with an error that the model's side understands."""
    done = ast.Expr(value=_call(names.DONE))
    handler = ast.ExceptHandler(
        type=_name(names.STOP),
        name=None,
        body=[ast.Raise(exc=_call(names.TOLD), cause=ast.Constant(value=None))],
    )
    whole = ast.Try(body=[*body, done], handlers=[handler], orelse=[], finalbody=[])
    return [_placed(whole, body[0])]


def _name(name: str) -> ast.Name:
    return ast.Name(id=name, ctx=ast.Load())


def _call(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(func=_name(function), args=list(args), keywords=[])


def _placed(node: Node, like: ast.AST) -> Node:
    """Give made nodes, and the made ones in them, the place of the one that they stand for."""
    for child in ast.walk(node):
        if isinstance(child, ast.stmt | ast.expr | ast.excepthandler) and not hasattr(child, "lineno"):
            ast.copy_location(child, like)
    return node


class _Restricting(RestrictingNodeTransformer):
    """Changes one piece of code."""

    def __init__(self, filename: str) -> None:
        super().__init__()
        self._filename = filename

    def refuse(self, node: ast.AST, what: str, instead: str = "") -> NoReturn:
        """Refuse the code for what a node of it says.

        Raises:
            SandboxError: Always.
        """
        line = getattr(node, "lineno", None)
        raise SandboxError(
            f"{what} is not part of the sandbox's Python, at line {line} of {self._filename}"
            f"{'; ' + instead if instead else ''} (see docs/sandbox-language.md)",
            line,
        )

    def error(self, node: ast.AST, info: str) -> None:
        """Refuse what RestrictedPython refuses."""
        self.refuse(node, f"this ({info.rstrip('.')})")

    def not_allowed(self, node: ast.AST) -> None:
        """Refuse syntax that is not known to be harmless."""
        self.refuse(node, f"`{type(node).__name__}`")

    def statements(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return changed statements."""
        changed: list[ast.stmt] = []
        for statement in body:
            made = self.visit(statement)
            changed.extend(made if isinstance(made, list) else [made])
        return changed

    def definition(self, node: ast.FunctionDef | ast.Lambda | ast.ClassDef) -> None:
        """Change a definition that came by itself, in place."""
        self.visit(node)

    def _step(self, like: ast.AST) -> ast.stmt:
        return _placed(ast.Expr(value=_call(names.STEP)), like)

    # Names.

    def check_name(self, node: Any, name: str | None, allow_magic_methods: bool = False) -> None:  # noqa: FBT001, FBT002 - RestrictedPython's
        """Refuse names of Python's own; other underscores are the code's affair."""
        if name is None or (allow_magic_methods and name in names.MAGIC):
            return
        if not names.is_bindable(name):
            self.refuse(node, f"the name `{name}`")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Check a name."""
        self.check_name(node, node.id)
        if node.id == "super":
            self.refuse(node, "`super` as a value", "write `super().method(...)`")
        if node.id in _ENDING:
            self.refuse(node, f"`{node.id}`", "`Exception` is what code can raise and catch")
        return node

    def visit_Global(self, node: ast.Global) -> ast.AST:
        """Check names."""
        for name in node.names:
            self.check_name(node, name)
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        """Check names."""
        for name in node.names:
            self.check_name(node, name)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Check the name of an argument, and count what is spread into arguments."""
        if node.arg is not None:
            self.check_name(node, node.arg)
            return self.node_contents_visit(node)
        node.value = _placed(_call(names.SPREAD_KEYS, self.visit(node.value)), node.value)
        return node

    # Attributes and items.

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Ask a guard."""
        of_super = self._of_super(node)
        if of_super is not None:
            return of_super
        self._check_attribute(node)
        value = self.visit(node.value)
        if isinstance(node.ctx, ast.Load):
            return _placed(_call(names.GET, value, ast.Constant(value=node.attr)), node)
        guard = names.SET if isinstance(node.ctx, ast.Store) else names.DELETE
        node.value = _placed(_call(guard, value, ast.Constant(value=node.attr)), node.value)
        return node

    def _check_attribute(self, node: ast.Attribute) -> None:
        name = node.attr
        if name in INSPECT_ATTRIBUTES:
            self.refuse(node, f"the attribute `{name}`")
        if name.startswith("__") and not (name in _READABLE and isinstance(node.ctx, ast.Load)):
            self.refuse(node, f"the attribute `{name}`", "names of Python's own are no way to anything here")

    def _of_super(self, node: ast.Attribute) -> ast.AST | None:
        """Let ``super().method`` be, the only use of ``super`` that there is."""
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "super"):
            return None
        if call.args or call.keywords or not isinstance(node.ctx, ast.Load):
            self.refuse(node, "`super` with arguments", "write `super().method(...)`")
        if node.attr not in names.MAGIC:
            self._check_attribute(node)
        return _placed(_call(names.OF_SUPER, call, ast.Constant(value=node.attr)), node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Ask a guard for an item; one that is stored beside others is checked to be no slice."""
        node.value, node.slice = self.visit(node.value), self.visit(node.slice)
        if isinstance(node.ctx, ast.Del):
            return node
        if isinstance(node.ctx, ast.Store):
            node.value = _placed(_call(names.SEVERAL, node.value), node.value)
            node.slice = _placed(_call(names.ONE, _as_value(node.slice)), node.slice)
            return node
        return _placed(_call(names.ITEM, node.value, _as_value(node.slice)), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Have an attribute or an item stored by a guard, which looks at the value."""
        value = self.visit(node.value)
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Attribute):
            self._check_attribute(target)
            stored = _call(names.STORE, value, self.visit(target.value), ast.Constant(value=target.attr))
            return _placed(ast.Expr(value=stored), node)
        if len(node.targets) == 1 and isinstance(target, ast.Subscript):
            key = _as_value(self.visit(target.slice))
            return _placed(
                ast.Expr(value=_call(names.STORE_ITEM, value, self.visit(target.value), key)), node
            )
        if any(isinstance(one, ast.Starred) for each in node.targets for one in ast.walk(each)):
            value = _placed(_call(names.SPREAD, value), node.value)
        node.value, node.targets = value, [self.visit(one) for one in node.targets]
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Read, then evaluate, then store, as Python does, with guards between."""
        operator = ast.Constant(value=_OPERATORS[type(node.op)])
        target = node.target
        if isinstance(target, ast.Name):
            self.check_name(target, target.id)
            new = _call(names.INPLACE, operator, _name(target.id), self.visit(node.value))
            return _placed(ast.Assign(targets=[target], value=new), node)
        if isinstance(target, ast.Attribute):
            self._check_attribute(target)
            begun = _call(names.BEGIN_ATTRIBUTE, self.visit(target.value), ast.Constant(value=target.attr))
        else:
            begun = _call(names.BEGIN_ITEM, self.visit(target.value), _as_value(self.visit(target.slice)))
        return _placed(ast.Expr(value=_call(names.FINISH, operator, begun, self.visit(node.value))), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Check an assignment with an annotation, which is an expression like others."""
        if not isinstance(node.target, ast.Name):
            self.refuse(node, "an annotation of an attribute or an item")
        return self.node_contents_visit(node)

    # Operators.

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Have an operation's result measured."""
        operator = ast.Constant(value=_OPERATORS[type(node.op)])
        return _placed(_call(names.BINARY, operator, self.visit(node.left), self.visit(node.right)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Have an operation's result measured; ``-1`` and ``not x`` are as they are."""
        operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not) or isinstance(operand, ast.Constant):
            node.operand = operand
            return node
        return _placed(_call(names.UNARY, ast.Constant(value=_OPERATORS[type(node.op)]), operand), node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Have a comparison's result measured; a chain compares what is small."""
        left, others = self.visit(node.left), [self.visit(one) for one in node.comparators]
        if len(others) == 1:
            if isinstance(node.ops[0], ast.Is | ast.IsNot):
                node.left, node.comparators = left, others
                return node
            operator = ast.Constant(value=_OPERATORS[type(node.ops[0])])
            return _placed(_call(names.COMPARE, operator, left, others[0]), node)
        node.left = _placed(_call(names.SMALL, left), node.left)
        node.comparators = [_placed(_call(names.SMALL, one), one) for one in others]
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Have the parts of an f-string measured before they are put together."""
        parts = [self._part(one) for one in node.values]
        return _placed(_call(names.JOINED, ast.Tuple(elts=parts, ctx=ast.Load())), node)

    def _part(self, node: ast.expr) -> ast.expr:
        if not isinstance(node, ast.FormattedValue):
            return node
        spec: ast.expr = ast.Constant(value="")
        if node.format_spec is not None:
            spec = self.visit(node.format_spec)
        formatted = _call(names.FORMATTED, self.visit(node.value), ast.Constant(value=node.conversion), spec)
        return _placed(formatted, node)

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        """Count what is spread."""
        value = self.visit(node.value)
        node.value = (
            _placed(_call(names.SPREAD, value), node.value) if isinstance(node.ctx, ast.Load) else value
        )
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        """Count what is spread into a dict."""
        node.values = [
            self.visit(value)
            if key is not None
            else _placed(_call(names.SPREAD_KEYS, self.visit(value)), value)
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        node.keys = [self.visit(key) if key is not None else None for key in node.keys]
        return _counted(node, 8 * len(node.keys))

    def visit_List(self, node: ast.List) -> ast.AST:
        """Count a list that is written out."""
        return _counted(self.node_contents_visit(node), len(node.elts))

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        """Count a tuple that is written out."""
        return _counted(self.node_contents_visit(node), len(node.elts))

    def visit_Set(self, node: ast.Set) -> ast.AST:
        """Count a set that is written out."""
        return _counted(self.node_contents_visit(node), 8 * len(node.elts))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Check the parts of a call: whatever can be had may be called."""
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            self.refuse(node, "`super()` by itself", "write `super().method(...)`")
        self.node_contents_visit(node)
        node.func = _placed(_call(names.CALLEE, node.func), node.func)
        return node

    # Loops.

    def visit_For(self, node: ast.For) -> ast.AST:
        """Count the turns."""
        self.node_contents_visit(node)
        node.body.insert(0, self._step(node))
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        """Count the turns."""
        self.node_contents_visit(node)
        node.body.insert(0, self._step(node))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        """Count the turns."""
        if node.is_async:
            self.refuse(node.iter, "`async`")
        self.node_contents_visit(node)
        node.ifs.insert(0, _placed(_call(names.STEP), node.iter))
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        """Check the contexts, which are entered as they are."""
        return self.node_contents_visit(node)

    # Errors.

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Refuse to leave a ``finally`` in a way that forgets the error."""
        for statement in node.finalbody:
            self._check_stays(statement)
        return self.node_contents_visit(node)

    def _check_stays(self, node: ast.AST) -> None:
        if isinstance(node, ast.Return | ast.Break | ast.Continue):
            self.refuse(node, f"`{type(node).__name__.lower()}` in a `finally`", "put it after")
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            for child in ast.iter_child_nodes(node):
                self._check_stays(child)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        """Let a bare ``except`` catch errors, and not what ends the code."""
        self.node_contents_visit(node)
        self.check_name(node, node.name)
        if node.type is None:
            node.type = _placed(_name("Exception"), node)
        return node

    # Imports: none are left, names are looked up in a list.

    def visit_Import(self, node: ast.Import) -> Any:
        """Bind what the list has."""
        made: list[ast.stmt] = []
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self.check_name(node, alias.asname or top)
            whole = _call(names.IMPORT, ast.Constant(value=alias.name))
            if alias.asname is None:
                made.append(ast.Expr(value=whole))
                whole = _call(names.IMPORT, ast.Constant(value=top))
            made.append(ast.Assign(targets=[ast.Name(id=alias.asname or top, ctx=ast.Store())], value=whole))
        return [_placed(one, node) for one in made]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Bind what the list has."""
        if node.level or node.module is None:
            self.refuse(node, "an import by a relative name")
        made = []
        for alias in node.names:
            if alias.name == "*":
                self.refuse(node, "`import *`", "name what is imported")
            self.check_name(node, alias.asname or alias.name)
            found = _call(names.IMPORT, ast.Constant(value=node.module), ast.Constant(value=alias.name))
            made.append(
                ast.Assign(targets=[ast.Name(id=alias.asname or alias.name, ctx=ast.Store())], value=found)
            )
        return [_placed(one, node) for one in made]

    # Definitions.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Count the calls; do not let ``__exit__`` keep what ends the code."""
        self.check_name(node, node.name, allow_magic_methods=True)
        self.check_function_argument_names(node)
        self.node_contents_visit(node)
        node.body.insert(
            1 if ast.get_docstring(node, clean=False) is not None else 0, self._step(node.body[0])
        )
        self._check_decorators(node)
        if node.name == "__exit__":
            node.decorator_list.append(_placed(_name(names.LEAVING), node))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        """Count the calls."""
        self.check_function_argument_names(node)
        self.node_contents_visit(node)
        node.body = _placed(
            ast.IfExp(test=_call(names.STEP), body=node.body, orelse=ast.Constant(value=None)), node.body
        )
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Have the class known as the code's own."""
        self.check_name(node, node.name)
        if node.keywords:
            self.refuse(node, f"`class {node.name}` with keywords, a metaclass for one")
        self.node_contents_visit(node)
        if any(isinstance(base, ast.Starred) for base in node.bases):
            self.refuse(node, "`*` among a class's bases")
        node.bases = [_placed(_call(names.BASE, base), base) for base in node.bases]
        self._check_decorators(node)
        node.decorator_list.append(_placed(_name(names.DEFINED), node))
        return node

    def _check_decorators(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        node.decorator_list = [_placed(_call(names.CALLEE, one), one) for one in node.decorator_list]


def _counted(node: Any, num: int) -> ast.AST:
    """Have a container that is written out counted if it is not short."""
    if num <= _SHORT or not isinstance(getattr(node, "ctx", _LOAD), ast.Load):
        return node  # type: ignore[no-any-return] # the transformer's nodes are untyped
    return _placed(_call(names.DISPLAYED, ast.Constant(value=num), node), node)


def _as_value(node: ast.expr) -> ast.expr:
    """Return an index as an expression: slices are objects then."""
    if isinstance(node, ast.Slice):
        parts = [
            part if part is not None else ast.Constant(value=None)
            for part in (node.lower, node.upper, node.step)
        ]
        return _placed(_call(names.SLICE, *parts), node)
    if isinstance(node, ast.Tuple):
        node.elts = [_as_value(one) for one in node.elts]
    return node
