"""Recovers the syntax tree that a function was compiled from.

Source text is unreliable: a file may have been edited since its import, and import hooks compile something
else. Invariant: a returned definition compiles to exactly the code that runs; otherwise an error is raised.

The operations of a rewritten function, and their printed form: the whole text, or one in context.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import tokenize
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Final, cast

from nnsight_engine.tracing.loaded_code import imported_names
from nnsight_engine.tracing.source_text import parse

OperationCall = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Replaces a call expression: receives the operation's name, the callee, its positional and its
keyword arguments, and returns the expression's value.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One call expression of a function, named by its callee and a running number: ``self_c_proj_0``.

    Lines count from 0 at the function's first line: that at which the callee ends, that of the closing
    parenthesis.
    """

    name: str
    line: int
    end_line: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten:
    """A function whose calls go through an ``OperationCall``; ``operations`` are in the order of evaluation.

    ``function`` is plain even for a bound method; the caller binds it. ``source`` is the text of the function
    whose body was rewritten, decorators included, dedented.
    """

    function: FunctionType
    operations: tuple[Operation, ...]
    source: str
    first_line: int
    filename: str


class SourceNotAvailableError(ValueError):
    """A function's calls cannot be instrumented; the message has the reason and an alternative."""

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"{name} has no operations to offer: {reason}; {remedy}")
        self.name = name
        self.reason = reason
        self.remedy = remedy


LINES_BEFORE: Final = 5
"""Number of lines shown above an operation's line."""

LINES_AFTER: Final = 3
"""Number of lines shown below it."""


def format_source(rewritten: Rewritten) -> str:
    """Return the function's text with the names of operations at their lines.

    A line's first operation is shown beside its text; further ones have rows with a ``+`` for the number::

        self_c_attn_0 -> 24     query, key, value = self.c_attn(hidden).split(self.size, dim=2)
        split_0       ->  +
                         25
    """
    lines = rewritten.source.split("\n")
    names: dict[int, list[str]] = {}
    for operation in rewritten.operations:
        names.setdefault(operation.line, []).append(operation.name)
    name_width = max((len(operation.name) for operation in rewritten.operations), default=0)
    number_width = len(str(len(lines) - 1))
    rows: list[str] = []
    for number, line in enumerate(lines):
        name, *more_names = names.get(number, [""])
        arrow = "->" if name else "  "
        rows.append(f"{name:<{name_width}} {arrow} {number:>{number_width}} {line}")
        rows.extend(f"{further:<{name_width}} -> {'+':>{number_width}}" for further in more_names)
    return "\n".join(row.rstrip() for row in rows)


def format_operation(rewritten: Rewritten, operation: Operation, path: str) -> str:
    """Return the lines around an operation, its own between ``-->`` and ``<--``."""
    lines = rewritten.source.split("\n")
    start = max(0, operation.line - LINES_BEFORE)
    stop = min(len(lines), operation.line + LINES_AFTER + 1)
    rows = [f"{path}.{operation.name}:", ""]
    if start > 0:
        rows += ["    ....", ""]
    for number in range(start, stop):
        marked = number == operation.line
        rows.append(f"--> {lines[number]} <--" if marked else f"    {lines[number]}")
    if stop < len(lines):
        rows.append("    ....")
    return "\n".join(row.rstrip() for row in rows)


_ANNOTATIONS_FLAG: Final = annotations.compiler_flag

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, slots=True)
class Definition:
    """A function's statement, decorators included, at its place in the file."""

    node: FunctionNode
    lines: tuple[str, ...]
    first_line: int
    imported: frozenset[str]

    def dedented(self) -> str:
        """Return the text dedented; lines inside strings with less indentation are unchanged."""
        indent = self.lines[0][: len(self.lines[0]) - len(self.lines[0].lstrip())]
        return "\n".join(line.removeprefix(indent) for line in self.lines)

    def text_of(self, node: ast.expr) -> str:
        """Return the text of an expression in the statement; columns count bytes of UTF-8."""
        start = node.lineno - self.first_line
        stop = (node.end_lineno or node.lineno) - self.first_line + 1
        lines = [line.encode() for line in self.lines[start:stop]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"\n".join(lines).decode()


def find_definition(function: FunctionType, name: str) -> Definition:
    """Find a function's statement; SourceNotAvailableError if the text is not the code that runs."""
    code = function.__code__
    try:
        # The code and not the function, whose ``__wrapped__`` would be followed.
        block, _ = inspect.getsourcelines(code)
        node = _parse(block, code)
        imported = _imported_names("".join(inspect.findsource(code)[0]))
    except (OSError, TypeError, SyntaxError, IndexError, tokenize.TokenError) as error:
        raise SourceNotAvailableError(
            name,
            f"the text that it was compiled from, in {code.co_filename!r}, cannot be read ({error})",
            "define the function in a file or a notebook cell",
        ) from error
    if not isinstance(node, FunctionNode):
        raise SourceNotAvailableError(name, "it was not defined by a def statement", "write it as one")
    num_lines = (node.end_lineno or node.lineno) - code.co_firstlineno + 1
    lines = tuple(line.rstrip("\r\n") for line in block[:num_lines])
    definition = Definition(node, lines, code.co_firstlineno, imported)
    if not _compiles_to(definition, code):
        raise SourceNotAvailableError(
            name,
            f"the running code differs from line {code.co_firstlineno} of {code.co_filename!r}",
            "import the module again if the file was edited, or switch off the import hook that changes it",
        )
    return definition


def compile_definition(definition: Definition, code: CodeType, extra_free: tuple[str, ...] = ()) -> CodeType:
    """Compile a function's statement, instrumented or not, in a scope like that of the original ``code``.

    The same names (and ``extra_free``) are free, ``__class__`` included, private names are mangled for the
    same class, and positions are those of the file. LookupError if it does not define the function of
    ``code``.
    """
    node = definition.node
    owner = _class_around(code.co_qualname)
    free = [name for name in (*code.co_freevars, *extra_free) if owner is None or name != "__class__"]
    # The class's or the function's own name is bound here; in the original it may be global.
    bound = node.name if owner is None else owner
    body: list[ast.stmt] = [] if bound in free else [ast.Global([bound])]
    if free:
        body.append(ast.Assign([ast.Name(name, ast.Store()) for name in free], ast.Constant(None)))
    body.append(node if owner is None else _class_of(owner, node))
    # Parsed rather than constructed, since the fields of these nodes differ between Python versions.
    tree = parse("def surroundings(): pass")
    cast("ast.FunctionDef", tree.body[0]).body = body
    # Python compiles calls of imported modules' functions differently from method calls.
    tree.body += [ast.Import([ast.alias(name)]) for name in sorted(definition.imported)]
    ast.fix_missing_locations(tree)
    flags = code.co_flags & _ANNOTATIONS_FLAG
    compiled = _find(compile(tree, code.co_filename, "exec", flags=flags, dont_inherit=True), code)
    if compiled is None:
        raise LookupError(f"no {code.co_name} at line {code.co_firstlineno} of {code.co_filename}")
    return _renamed(compiled, compiled.co_qualname, code.co_qualname)


def _class_of(name: str, node: FunctionNode) -> ast.ClassDef:
    class_node = cast("ast.ClassDef", parse("class Owner: pass").body[0])
    class_node.name, class_node.body = name, [node]
    return class_node


def _parse(block: list[str], code: CodeType) -> ast.stmt:
    """Parse lines at their place in the file; a block under an ``if``, since dedenting changes strings."""
    lines_above = code.co_firstlineno - 1
    text = "".join(block)
    if not block[0][:1].isspace():
        return parse("\n" * lines_above + text, code.co_filename).body[0]
    conditional = parse("\n" * (lines_above - 1) + "if True:\n" + text, code.co_filename).body[0]
    return cast("ast.If", conditional).body[0]


# One file defines the modules of a whole model, and parsing it takes longer than the rest of this module.
@functools.lru_cache(maxsize=32)
def _imported_names(text: str) -> frozenset[str]:
    return frozenset(imported_names(parse(text)))


def _class_around(qualname: str) -> str | None:
    """Return the innermost class in a qualified name, for name mangling; None if there is none."""
    parts = qualname.split(".")
    for name, following in reversed(list(itertools.pairwise(parts))):
        if "<locals>" not in (name, following):
            return name
    return None


def _find(tree_code: CodeType, wanted: CodeType) -> CodeType | None:
    """Return the code inside ``tree_code`` that has the name and the line of ``wanted``; None without one."""
    for const in tree_code.co_consts:
        if not isinstance(const, CodeType):
            continue
        if (const.co_name, const.co_firstlineno) == (wanted.co_name, wanted.co_firstlineno):
            return const
        inner_code = _find(const, wanted)
        if inner_code is not None:
            return inner_code
    return None


def _renamed(code: CodeType, old: str, new: str) -> CodeType:
    consts = (_renamed(const, old, new) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_qualname=new + code.co_qualname.removeprefix(old), co_consts=tuple(consts))


def _compiles_to(definition: Definition, code: CodeType) -> bool:
    """Return whether a definition's text compiles to exactly the running code."""
    try:
        return _same_code(compile_definition(definition, code), code)
    except (LookupError, SyntaxError):
        return False


def _same_code(code: CodeType, other: CodeType) -> bool:
    """Compare code objects without caches of executed code, which Python's comparison includes in 3.11."""
    return (
        _outline(code) == _outline(other)
        and len(code.co_consts) == len(other.co_consts)
        and all(map(_same_const, code.co_consts, other.co_consts))
    )


def _outline(code: CodeType) -> tuple[object, ...]:
    """Return what determines how code runs, except its constants."""
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_firstlineno,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
    )


def _same_const(const: object, other: object) -> bool:
    if isinstance(const, CodeType) and isinstance(other, CodeType):
        return _same_code(const, other)
    return type(const) is type(other) and const == other
