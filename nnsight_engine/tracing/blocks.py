"""Compilation of a ``with`` block to a function, from its syntax tree, with its variables in shared cells.

The tree keeps its file name and line numbers. A block inside a block gets the same cells, as a nested
function does; invokes get copies (see ``interleaving.shared_variables``). A block from text is compiled as if
indented in a ``with`` statement: its line 1 becomes line 2. These constructs are rewritten:

``with EXPR as T: BODY``
    may open a trace whose body must not run here. It becomes ``with bind(lambda: (names), i, EXPR) as T:``
    ``if not deferred(…): BODY``. The lambda is never called; it captures the cells of the names in BODY.
    Contexts that are not traces run as before. ``with A, B:`` becomes two nested statements.

``for T in ITER: BODY``
    may loop over generation steps whose number is not known in advance. When generation is over, a request
    inside BODY raises ``IterationOver``; the loop it belongs to ends normally and the code after it runs.

``X.requires_grad = VALUE``
    may be applied to a computed value, so ``asked_for_gradients(X)`` takes the place of ``X``.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

from nnsight_engine.core.errors import IterationOver
from nnsight_engine.core.gradients import asked_for_gradients
from nnsight_engine.tracing.block_names import (
    is_bare_super,
    leaving,
    mangled,
    mangled_name,
    names_in,
    names_outside,
    stored_in,
)
from nnsight_engine.tracing.counted_stores import (
    BIND,
    OWN,
    attribute,
    call,
    capture_of,
    count_stores,
    load,
    located,
    store,
    visited,
)
from nnsight_engine.tracing.loaded_code import FUTURE_FLAGS, sent_name
from nnsight_engine.tracing.source_text import SourceText, parameters, parse

DEFERRED = "__nnsight_deferred__"
OVER = "__nnsight_over__"
REQUIRES_GRAD = "__nnsight_requires_grad__"
_HELPERS = (BIND, DEFERRED, OVER, OWN, REQUIRES_GRAD)
WITH_MARKER = "__nnsight_with_"
"""Prefix of the name that holds the context of a rewritten ``with`` statement."""
_OUTER = "__nnsight_scope__"


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    """A ``with`` statement inside a block, which may turn out to open a trace."""

    node: ast.With
    item: int

    @property
    def body(self) -> list[ast.stmt]:
        """The statements under this item: the block, wrapped in the remaining items if there are any."""
        rest = self.node.items[self.item + 1 :]
        if not rest:
            return self.node.body
        return [ast.copy_location(ast.With(items=rest, body=self.node.body), self.node)]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A compiled block, independent of any run.

    Attributes:
        code: The function's code; its free variables are the block's shared variables and our helpers.
        stored: Names the block may assign, including those of blocks inside it.
        nested: The ``with`` statements in it, by the index that its code passes to ``bind``.
        context: The context with which a nested block is compiled.
        counts: Whether its code assigns through an ``Assignments``.
    """

    code: CodeType
    stored: tuple[str, ...]
    source: SourceText
    line: int
    end_line: int
    nested: tuple[Nested, ...]
    context: BlockContext
    origin: Nested
    counts: bool = False
    compiled: dict[int, Block] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip("\n") for line in self.source.lines[self.line - 1 : self.end_line])

    def function(
        self,
        variables: Mapping[str, CellType],
        helpers: Mapping[str, CellType],
        globals_: dict[str, Any],
    ) -> Callable[[], Any]:
        """Return the block as a function on these cells; variables without a cell start unbound."""
        code = self.code
        try:
            cells = [variables[name] for name in code.co_freevars]
        except KeyError:
            cells = [variables.get(name) or _helper_cell(name, helpers) for name in code.co_freevars]
        return FunctionType(code, globals_, code.co_name, None, tuple(cells))

    def counting(self) -> Block:
        """Return the variant of this block that counts its assignments, compiled once."""
        if self.counts:
            return self
        block = self.compiled.get(_COUNTING)
        if block is None:
            shared = frozenset(self.code.co_freevars) - frozenset(_HELPERS)
            block = compile_block(self.origin, self.source, shared, self.context, counts=True)
            self.compiled[_COUNTING] = block
        return block

    def inner(self, index: int, names: Sequence[str]) -> Block:
        """Return the block of a nested ``with``, compiled once; ``names`` are the cells that it shares."""
        block = self.compiled.get(index)
        if block is None:
            block = compile_block(self.nested[index], self.source, frozenset(names), self.context)
            self.compiled[index] = block
        return block

    def used_after(self, index: int) -> frozenset[str]:
        names = names_outside(self.nested[index].node, self.origin.body)
        return mangled(names, self.context.class_name)


_COUNTING = -1
"""Key of ``Block.compiled`` for the counting variant of the block itself."""


def _helper_cell(name: str, helpers: Mapping[str, CellType]) -> CellType:
    cell = HELPERS.get(name) or helpers.get(name)
    return cell if cell is not None else CellType()


@dataclasses.dataclass(frozen=True, slots=True)
class BlockContext:
    """The place of a block in the user's code.

    Attributes:
        class_name: The class around it, which determines the mangling of ``self.__x``, or None.
        first_argument: The surrounding function's first argument, for ``super()`` without arguments.
        flags: ``from __future__`` features of the user's file.
    """

    name: str
    class_name: str | None
    first_argument: str | None
    flags: int


def context_of(code: CodeType) -> BlockContext:
    """Return the place of a function's code, by its qualified name; the code's source is not needed."""
    parts = [part for part in code.co_qualname.split(".") if part != "<locals>"]
    in_method = code.co_qualname.endswith(f".{code.co_name}") and len(parts) > 1
    holder = code.co_qualname.split(".")[-2] if in_method else "<locals>"
    return BlockContext(
        name=code.co_name,
        class_name=None if holder == "<locals>" else holder,
        first_argument=code.co_varnames[0] if code.co_argcount else None,
        flags=code.co_flags & FUTURE_FLAGS,
    )


def compile_block(
    origin: Nested,
    source: SourceText,
    shared: frozenset[str],
    context: BlockContext,
    *,
    counts: bool = False,
) -> Block:
    """Compile a statement's block; ``shared`` names and those it assigns are shared with its surroundings.

    Raises:
        SyntaxError: A ``return``, ``yield``, ``await``, ``break`` or ``continue`` would leave the block.
    """
    body = origin.body
    _refuse_leaving(body, source)
    written = stored_in(body)
    stored = mangled(written, context.class_name)
    cells = sorted(shared | stored)
    rewriter = _Rewriter(context)
    statements = visited(rewriter, body)
    if counts:
        statements = count_stores(statements, written, partial(mangled_name, context.class_name))
    tree = _wrapped(statements, cells, sorted(stored), context.class_name)
    line = min(statement.lineno for statement in body)
    for node in (tree.body[0], *ast.walk(tree)):
        if isinstance(node, (ast.stmt, ast.expr)) and not hasattr(node, "lineno"):
            ast.copy_location(node, body[0])
    ast.fix_missing_locations(tree)
    try:
        module = compile(tree, source.filename, "exec", flags=context.flags, dont_inherit=True)
    except SyntaxError as error:
        if "outside loop" in str(error) or "not properly in loop" in str(error):
            raise _about_loop(error, source) from None
        raise
    code = _inner_code(module).replace(co_name=context.name, co_qualname=context.name)
    return Block(
        code=code,
        stored=tuple(sorted(stored)),
        source=source,
        line=line,
        end_line=max(statement.end_lineno or statement.lineno for statement in body),
        nested=tuple(rewriter.nested),
        context=context,
        origin=origin,
        counts=counts,
    )


def _wrapped(
    statements: list[ast.stmt], cells: list[str], stored: list[str], class_name: str | None
) -> ast.Module:
    """Nest the block in a function that owns its shared names, so that the compiler makes them cells."""
    if stored:
        statements = [ast.Nonlocal(names=stored), *statements]
    block = ast.FunctionDef(name="__nnsight_block__", args=parameters([]), body=statements, decorator_list=[])
    owner = ast.FunctionDef(
        name=_OUTER, args=parameters([*_HELPERS, *cells]), body=[block], decorator_list=[]
    )
    top: ast.stmt = owner
    if class_name is not None:
        top = ast.ClassDef(name=class_name, bases=[], keywords=[], body=[owner], decorator_list=[])
    return ast.Module(body=[top], type_ignores=[])


def _inner_code(code: CodeType) -> CodeType:
    """Return the code of the block itself inside the module that ``_wrapped`` made for it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            return constant if constant.co_name == "__nnsight_block__" else _inner_code(constant)
    raise AssertionError("a compiled block holds its own code")


class _Rewriter(ast.NodeTransformer):
    """Rewrites nested ``with`` and ``for`` statements, see the module; copies nodes before a change."""

    def __init__(self, context: BlockContext) -> None:
        self.context = context
        self.nested: list[Nested] = []
        self.loops = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Visit a copy, because nested blocks are compiled from the same tree later."""
        return super().generic_visit(_copy_node(node))

    def visit_With(self, node: ast.With) -> ast.AST:
        return self._with_item(node, 0)

    def _with_item(self, node: ast.With, item: int) -> ast.stmt:
        """Rewrite one context of a ``with`` statement, and those after it as nested statements."""
        index = len(self.nested)
        nested = Nested(node, item)
        self.nested.append(nested)
        last = item + 1 == len(node.items)
        inner = visited(self, node.body) if last else [self._with_item(node, item + 1)]
        marker = f"{WITH_MARKER}{index}__"
        original = node.items[item]
        capture = capture_of(sorted(names_in(nested.body)))
        bound = call(load(BIND), capture, ast.Constant(value=index), self.visit(original.context_expr))
        target = original.optional_vars
        entered = ast.withitem(
            context_expr=ast.NamedExpr(target=store(marker), value=bound),
            optional_vars=self.visit(target) if target is not None else None,
        )
        runs_here = ast.UnaryOp(op=ast.Not(), operand=call(load(DEFERRED), load(marker)))
        body: list[ast.stmt] = [ast.If(test=runs_here, body=inner, orelse=[])]
        return located(ast.With(items=[entered], body=body), node)

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        """Rewrite a loop, so that ``IterationOver`` of its own iterator ends it; see the module."""
        number = self.loops
        self.loops += 1
        loop, error = f"__nnsight_loop_{number}__", f"__nnsight_over_{number}__"
        remember = ast.Assign(targets=[store(loop)], value=self.visit(node.iter))
        again = ast.For(
            target=self.visit(node.target),
            iter=load(loop),
            body=visited(self, node.body),
            orelse=visited(self, node.orelse),
        )
        is_others = ast.Compare(left=attribute(error, "loop"), ops=[ast.IsNot()], comparators=[load(loop)])
        reraise = ast.If(test=is_others, body=[ast.Raise()], orelse=[])
        handler = ast.ExceptHandler(type=load(OVER), name=error, body=[reraise, *visited(self, node.orelse)])
        guarded = ast.Try(body=[located(again, node)], handlers=[handler], orelse=[], finalbody=[])
        return [located(remember, node.iter), located(guarded, node)]

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Rewrite an assignment to ``requires_grad``, see the module."""
        if node.attr != "requires_grad" or not isinstance(node.ctx, ast.Store):
            return self.generic_visit(node)
        owner = call(load(REQUIRES_GRAD), self.visit(node.value))
        return located(ast.Attribute(value=owner, attr=node.attr, ctx=ast.Store()), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Write out the arguments of ``super()``: the block's function has no first argument."""
        copied = self.generic_visit(node)
        first_argument = self.context.first_argument
        if isinstance(copied, ast.Call) and is_bare_super(copied) and first_argument is not None:
            copied.args = [load("__class__"), load(first_argument)]
            return located(copied, node)
        return copied

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Drop the annotation of a name: it is never evaluated, and not allowed on a ``nonlocal`` name."""
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        if node.value is None:
            return located(ast.Pass(), node)
        return located(ast.Assign(targets=[self.visit(node.target)], value=self.visit(node.value)), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Rewrite the body of a function defined in the block, but not ``super()`` in it."""
        outer = self.context
        self.context = dataclasses.replace(outer, first_argument=None)
        try:
            return self.generic_visit(node)
        finally:
            self.context = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Return a class unchanged: a class scope cannot provide cells."""
        return node


def _copy_node(node: ast.AST) -> ast.AST:
    fields = {name: [*value] if isinstance(value, list) else value for name, value in ast.iter_fields(node)}
    return ast.copy_location(type(node)(**fields), node)


def _refuse_leaving(body: Sequence[ast.stmt], source: SourceText) -> None:
    """Raise SyntaxError at the first ``return``, ``yield`` or ``await`` that would leave the block."""
    for node in leaving(body):
        word = type(node).__name__.lower()
        raise _syntax_error(
            f"`{word}` is not allowed in a traced block, which runs as a separate function while the model "
            "runs; save the value in the block and use it afterwards",
            source,
            getattr(node, "lineno", 1),
            getattr(node, "col_offset", 0) + 1,
        )


def _about_loop(error: SyntaxError, source: SourceText) -> SyntaxError:
    """Return an error in the user's terms for ``break`` or ``continue`` of a loop around the block."""
    word = "continue" if "continue" in str(error) else "break"
    return _syntax_error(
        f"`{word}` cannot refer to a loop around a traced block, which runs as a separate function while the "
        f"model runs. Save a flag in the block and check it afterwards: `done = save(True)` in the block, "
        f"`if done: {word}` below it",
        source,
        error.lineno or 1,
        error.offset,
    )


def _syntax_error(message: str, source: SourceText, line: int, column: int | None) -> SyntaxError:
    text = source.lines[line - 1] if line <= len(source.lines) else ""
    return SyntaxError(message, (sent_name(source.filename), line, column, text))


HELPERS: dict[str, CellType] = {OVER: CellType(IterationOver), REQUIRES_GRAD: CellType(asked_for_gradients)}
"""The helpers that need no tracer; ``tracer`` adds ``bind`` and ``deferred``."""


NUM_LINES_BEFORE = 1
"""Number of lines of a block's source that precede the text."""
_STATEMENT = "with trace:\n"
_INDENT = "    "


def block_of_text(text: str, filename: str, names: frozenset[str]) -> Block:
    """Compile text as a block whose ``names`` are bound at its start; errors have the text's lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    tree = _parsed(text, filename)
    if not tree.body:
        raise SyntaxError("there are no statements in it", (filename, 1, 1, ""))
    try:
        return _compiled(_STATEMENT + _indented(text, tree), filename, names)
    except SyntaxError as error:
        error.lineno = max((error.lineno or 1) - NUM_LINES_BEFORE, 1)
        raise
    except (RecursionError, MemoryError) as error:
        raise _too_deep(filename) from error


def _compiled(whole: str, filename: str, names: frozenset[str]) -> Block:
    """Compile the text of a whole ``with`` statement; ``names`` are shared with its surroundings."""
    (statement,) = parse(whole, filename).body
    assert isinstance(statement, ast.With)  # noqa: S101 - the text begins with it
    lines = tuple(f"{line}\n" for line in whole.split("\n"))
    source = SourceText(filename, lines, ast.Module(body=[statement], type_ignores=[]))
    context = BlockContext(name="trace", class_name=None, first_argument=None, flags=0)
    return compile_block(Nested(statement, 0), source, names, context)


def _parsed(text: str, filename: str) -> ast.Module:
    """Parse a block's text; its SyntaxErrors have a line."""
    try:
        return parse(text, filename)
    except (RecursionError, MemoryError) as error:
        raise _too_deep(filename) from error
    except SyntaxError as error:
        if error.lineno is None:  # null bytes
            error.lineno = 1
        raise


def _too_deep(filename: str) -> SyntaxError:
    return SyntaxError("its expressions or statements are nested too deeply", (filename, 1, 1, ""))


def _indented(text: str, tree: ast.Module) -> str:
    """Indent a text by one level, except lines that begin inside a string."""
    inside_strings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        ):
            inside_strings.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    lines = text.split("\n")
    return "\n".join(
        line if number in inside_strings or not line.strip() else _INDENT + line
        for number, line in enumerate(lines, start=1)
    )
