"""Comparison of source text with loaded code: a file or a cell may have been edited since it was loaded.

Instructions are compared by position. In a module that was loaded through an import hook, such as pytest's,
the text's instructions must be present, and there may be additional ones.

File names of received code: the name object itself holds the source text.

A client may state any file name, of this machine or of another client. So such a name is never used to look
up text: code objects keep the name object that they were compiled with, and the text is read from that
object.
"""

from __future__ import annotations
import __future__

import ast
import dis
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, SourceFileLoader
from types import CodeType
from typing import Any, Final, overload
from zipimport import zipimporter

Defining = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef

Instruction = tuple[str, str, int | None, int | None, int | None]
"""Operation, argument, line, first column, last column."""

FUTURE_FLAGS: Final = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
"""The compiler's flags for all ``from __future__`` features."""

_UNSAID: Final = frozenset({
    "CACHE", "COPY", "COPY_FREE_VARS", "EXTENDED_ARG", "MAKE_CELL", "NOP", "NOT_TAKEN", "POP_TOP", "PRECALL",
    "PRINT_EXPR", "PUSH_NULL", "RESUME", "RETURN_CONST", "RETURN_VALUE", "SWAP",
})  # fmt: skip
"""Instructions that depend on the code around them, not only on the text at their position."""

_PLAIN_LOADERS: Final = (SourceFileLoader, zipimporter, BuiltinImporter, FrozenImporter)


def matches(tree: ast.Module, code: CodeType, globals_: Mapping[str, Any], node: ast.stmt) -> bool:
    """Return whether a statement matches the loaded code around it; ``globals_`` show the module's loader."""
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    loaded = _instructions(code, lines)
    return any(
        _agree(_instructions(candidate, lines), loaded, node, globals_)
        for candidate in _compiled(tree, code, node)
    )


def defines(tree: ast.Module, code: CodeType, globals_: Mapping[str, Any], node: Defining) -> bool:
    """Return whether a definition in a text matches the loaded code of a function; see ``matches``."""
    loaded = _instructions(code)
    return any(
        _agree(_instructions(inner), loaded, node, globals_)
        for candidate in _compiled(tree, code, node)
        for inner in _codes(candidate)
        if (inner.co_name, inner.co_firstlineno) == (code.co_name, code.co_firstlineno)
    )


def _agree(
    written: set[Instruction], loaded: set[Instruction], node: ast.AST, globals_: Mapping[str, Any]
) -> bool:
    """Return whether the instructions of a text are the loaded ones; an import hook may have changed some."""
    if any(column is None for *_, column in loaded):  # compiled with -X no_debug_ranges
        written, loaded = _without_columns(written), _without_columns(loaded)
    if written == loaded:
        return True
    if not _is_hooked(globals_):
        return False
    assert_lines = [  # pytest rewrites them
        range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Assert)
    ]
    missing = {
        instruction
        for instruction in written - loaded
        if not any(instruction[2] in lines for lines in assert_lines)
    }
    return missing <= _replaced(node, loaded)


def _replaced(node: ast.AST, loaded: set[Instruction]) -> set[Instruction]:
    """Return the written instructions of augmented assignments that an import hook has replaced.

    typeguard replaces ``x += y`` by a call: the operation is gone, its operand remains.
    """
    operations = {instruction[2:] for instruction in loaded if instruction[0] == "BINARY_OP"}
    replaced: set[Instruction] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.AugAssign) and _position(inner) not in operations:
            written = _instructions(compile(ast.Module([inner], []), "", "exec"))
            positions = {_position(inner), _position(inner.target)}
            replaced |= {instruction for instruction in written if instruction[2:] in positions}
    return replaced


def _position(node: ast.stmt | ast.expr) -> tuple[int, int, int | None]:
    return (node.lineno, node.col_offset, node.end_col_offset)


def _without_columns(instructions: set[Instruction]) -> set[Instruction]:
    return {(name, argument, line, None, None) for name, argument, line, *_ in instructions}


def _is_hooked(globals_: Mapping[str, Any]) -> bool:
    loader = globals_.get("__loader__")
    return not (loader is None or loader in _PLAIN_LOADERS or type(loader) in _PLAIN_LOADERS)


def _compiled(tree: ast.Module, code: CodeType, node: ast.stmt | ast.expr) -> Iterator[CodeType]:
    """Compile a node's top-level statement with this process's options, then with others it may have had."""
    top_level = next(
        (
            statement
            for statement in tree.body
            if first_line(statement) <= node.lineno <= (statement.end_lineno or 0)
        ),
        None,
    )
    if top_level is None:
        return
    flags = code.co_flags & FUTURE_FLAGS | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    # Python compiles calls of imported modules' functions in another way than method calls.
    imports = [ast.Import([ast.alias(name)]) for name in sorted(set(imported_names(tree)))]
    module = ast.fix_missing_locations(ast.Module([top_level, *imports], []))
    prompt = ast.fix_missing_locations(ast.Interactive([top_level, *imports]))
    ways: list[tuple[ast.Module | ast.Interactive, str, int]]
    ways = [(module, "exec", level) for level in (-1, 0, 1, 2)]
    for text, mode, level in (*ways, (prompt, "single", -1)):
        try:
            yield compile(text, code.co_filename, mode, flags=flags, dont_inherit=True, optimize=level)
        except (SyntaxError, ValueError, RecursionError):
            return


def first_line(node: ast.stmt | ast.expr) -> int:
    """Return the first line of a definition, decorators included."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module's own imports bind, not those of functions and classes in it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            yield from (name for name in names if name != "*")
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            yield from imported_names(node)


def _instructions(code: CodeType, lines: range | None = None) -> set[Instruction]:
    """Return the compared instructions of code and of functions in it; of these lines only, if given."""
    instructions: set[Instruction] = set()
    for inner in _codes(code):
        for instruction in dis.get_instructions(inner):
            positions = instruction.positions
            line = None if positions is None else positions.lineno
            if positions is not None and _is_compared(instruction) and (lines is None or line in lines):
                columns = (positions.col_offset, positions.end_col_offset)
                instructions.add((_kind(instruction.opname), _argument(instruction, inner), line, *columns))
    return instructions


def _is_compared(instruction: dis.Instruction) -> bool:
    """Return whether an instruction depends on the text at its position only."""
    if (
        instruction.opname in _UNSAID
        or "JUMP" in instruction.opname
        or instruction.positions is None
        or instruction.positions.lineno is None
    ):
        return False
    is_end_of_function = instruction.opname == "LOAD_CONST" and instruction.argval is None  # or of a block
    return not is_end_of_function


def _kind(name: str) -> str:
    """Return an operation's name, the same for every scope of a variable."""
    if name in {"LOAD_METHOD", "LOAD_ATTR"}:
        return "LOAD_ATTR"
    if name.startswith(("LOAD_", "STORE_", "DELETE_")) and name.endswith(_SCOPES):
        return name.partition("_")[0]
    return name


_SCOPES: Final = ("_NAME", "_FAST", "_GLOBAL", "_DEREF", "_CLOSURE", "_CLASSDEREF", "_FAST_CHECK")


def _argument(instruction: dis.Instruction, code: CodeType) -> str:
    """Return an instruction's argument in a form that is the same in any compilation of the text."""
    if isinstance(instruction.argval, CodeType):
        return instruction.argval.co_name
    if instruction.opname in {"FOR_ITER", "SEND"}:
        return ""  # a position in the code
    if instruction.opname == "KW_NAMES":
        return repr(code.co_consts[instruction.arg or 0])
    return f"{type(instruction.argval).__name__} {_constant(instruction.argval)}"


def _constant(value: object) -> str:
    """Return a constant's text, in which a frozenset has an order."""
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(_constant, value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return repr(value)


class Lines(Sequence[str]):
    """Lines by number from 0, each of which can be computed on access."""

    __slots__ = ()

    @abstractmethod
    def line_at(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        numbers = range(len(self))[index]
        return self.line_at(numbers) if isinstance(numbers, int) else list(map(self.line_at, numbers))

    def __iter__(self) -> Iterator[str]:
        return map(self.line_at, range(len(self)))


class LinesFrom(Lines):
    """The lines of a text at their numbers in a file, after empty lines that use no memory."""

    __slots__ = ("_before", "_lines", "num_characters")

    def __init__(self, first: int, text: str) -> None:
        """Place a text; ``first`` is the number of its first line, from 1."""
        self.num_characters = len(text)
        self._before = first - 1
        self._lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")] if text else []

    def __len__(self) -> int:
        return self._before + len(self._lines)

    def line_at(self, index: int) -> str:
        return self._lines[index - self._before] if index >= self._before else "\n"


class SentFile(str):
    """The file name of received code; ``sent`` is the name as the client sent it, shown in errors.

    ``tree`` returns the syntax tree of ``lines`` as it was compiled here.
    """

    __slots__ = ("lines", "sent", "tree")
    sent: str
    lines: LinesFrom
    tree: Callable[[], ast.Module] | None

    def __new__(
        cls,
        sent: str,
        lines: LinesFrom | None = None,
        tree: Callable[[], ast.Module] | None = None,
    ) -> SentFile:
        """Create the name with its text, ``lines``; ``tree`` returns the syntax tree that was compiled."""
        name = super().__new__(cls, sent)
        name.sent, name.tree = str(sent), tree
        name.lines = lines if lines is not None else LinesFrom(1, "")
        return name

    def line(self, number: int) -> str:
        """Return a line by its number, from 1; empty if it was not received."""
        return self.lines[number - 1] if 1 <= number <= len(self.lines) else ""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.sent,)


def sent_name(filename: str) -> str:
    return filename.sent if isinstance(filename, SentFile) else filename
