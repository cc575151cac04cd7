"""Trace sites: the places in a program where a ``with`` statement opens a trace.

A site is one instruction of one code object, so two sites are never confused: not two contexts on a line, not
the iterations of a loop. Each is found and compiled once; a later run costs a dictionary look-up.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import itertools
import linecache
from collections import OrderedDict
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Final, Generic, TypeVar

from nnsight_engine.tracing.block_names import mangled, names_in
from nnsight_engine.tracing.blocks import (
    WITH_MARKER,
    Block,
    Nested,
    compile_block,
    context_of,
)
from nnsight_engine.tracing.frames import BlockExit, is_function, own_names, read_variables
from nnsight_engine.tracing.loaded_code import SentFile, matches, sent_name
from nnsight_engine.tracing.source_text import (
    ChangedSourceError,
    SourceReader,
    SourceText,
    WithBlockNotFoundError,
)

_ENTERS = frozenset({"BEFORE_WITH", "SETUP_WITH"})
_MAX_FRAMES = 8
"""Number of frames that are searched for a ``with``: subclasses may wrap ``__enter__``."""

_MAX_RECEIVED: Final = 256
_MAX_RECEIVED_CHARACTERS: Final = 16 * 1024
"""Maximum number of characters of received code that is cached."""
Key = TypeVar("Key")
Value = TypeVar("Value")
Span = tuple[int | None, int | None, int | None, int | None]


@dataclasses.dataclass(frozen=True, slots=True)
class TraceSite:
    """One place that opens a trace.

    Attributes:
        code: The code object, referenced so that its id stays valid.
        names: The block's variables that live in the surrounding frame.
        module_names: Names that the block assigns and the function around it declares ``global``.
    """

    code: CodeType
    block: Block
    names: frozenset[str]
    module_names: frozenset[str]
    does_nothing: bool
    block_exit: BlockExit


class _CacheByCode(Generic[Key, Value]):
    """A bounded cache by code; received code, as much as clients send, never evicts the program's own."""

    def __init__(self, max_entries: int) -> None:
        self.of_program: OrderedDict[Key, Value] = OrderedDict()
        self.received: OrderedDict[Key, Value] = OrderedDict()
        self._max_entries = max_entries

    def get(self, key: Key) -> Value | None:
        value = self.of_program.get(key)
        return value if value is not None else self.received.get(key)

    def put(self, key: Key, code: CodeType, value: Value) -> None:
        """Store a value for a piece of ``code``; large received code is not cached."""
        table, max_entries, file = self.of_program, self._max_entries, code.co_filename
        if isinstance(file, SentFile):
            if file.lines.num_characters > _MAX_RECEIVED_CHARACTERS:
                return
            table, max_entries = self.received, _MAX_RECEIVED
        table[key] = value
        if len(table) > max_entries:
            table.popitem(last=False)

    def clear(self) -> None:
        self.of_program.clear()
        self.received.clear()


class TraceSites:
    """Finds and compiles trace sites, and answers questions about the instruction that a frame is at."""

    def __init__(self, reader: SourceReader, *, max_sites: int = 8192) -> None:
        self.reader = reader
        self._sites: _CacheByCode[tuple[int, int], TraceSite] = _CacheByCode(max_sites)
        self._layouts: _CacheByCode[int, _Layout] = _CacheByCode(max_sites)

    def clear(self) -> None:
        self._sites.clear()
        self._layouts.clear()
        self.reader.clear()

    def known_site(self, frame: FrameType) -> TraceSite | None:
        """Return the site that ``frame`` is entering now, if it has run before."""
        return self._sites.get((id(frame.f_code), frame.f_lasti))

    def find(self, frame: FrameType) -> TraceSite:
        """Return the site that ``frame`` is entering; raise ``WithBlockNotFoundError`` or ``SyntaxError``."""
        site = self.known_site(frame)
        if site is None:
            site = self._compile(frame)
            if is_function(frame.f_code) or frame.f_locals is frame.f_globals:
                self._sites.put((id(frame.f_code), frame.f_lasti), frame.f_code, site)
        return site

    def entering(self, frame: FrameType | None) -> FrameType:
        """Return the frame that is at a ``with`` statement right now: this one, or one of its callers."""
        looked_at = frame
        for _ in range(_MAX_FRAMES):
            if looked_at is None:
                break
            if self.layout(looked_at.f_code).enters(looked_at.f_lasti):
                return looked_at
            looked_at = looked_at.f_back
        raise WithBlockNotFoundError(
            "A trace is opened by a `with` statement of its own: write `with model.trace(...):`. "
            "It cannot be entered by a call to __enter__ or through contextlib.ExitStack, because its block "
            f"would not be known.{_excerpt_of(frame)}"
        )

    def feeds_with(self, frame: FrameType) -> bool:
        return frame.f_lasti in self.layout(frame.f_code).feeding

    def result_is_dropped(self, frame: FrameType) -> bool:
        return frame.f_lasti in self.layout(frame.f_code).dropped

    def layout(self, code: CodeType) -> _Layout:
        """Return where the ``with`` statements of a code object are, read once."""
        layout = self._layouts.get(id(code))
        if layout is None:
            layout = _Layout(code)
            self._layouts.put(id(code), code, layout)
        return layout

    def _compile(self, frame: FrameType) -> TraceSite:
        """Find the ``with`` statement that a frame is entering in the source, and compile its block."""
        code = frame.f_code
        try:
            source = self.reader.read(code, frame.f_globals, lambda text: self._fits(text, frame))
        except ChangedSourceError as error:
            raise WithBlockNotFoundError(
                f"With block not found at line {frame.f_lineno} of {sent_name(code.co_filename)}: {error}\n"
                f"We looked here:\n\n{_excerpt(code.co_filename, frame.f_lineno)}"
            ) from None
        if source is None:
            raise WithBlockNotFoundError(
                f"The source of {sent_name(code.co_filename)!r} is not available, so the block under the "
                f"`with` at line {frame.f_lineno} cannot be read. For code made at run time, register its "
                "text: linecache.cache[filename] = (len(text), None, text.splitlines(True), filename) "
                "before exec"
            )
        nested = self._statement(frame, source)
        assert nested is not None  # noqa: S101 - guaranteed by _fits
        context = context_of(code)
        mentioned = mangled(names_in(nested.body), context.class_name)
        if is_function(code):
            shared = mentioned & own_names(code)
        elif frame.f_locals is frame.f_globals:
            shared = frozenset()
        else:
            shared = mentioned & frozenset(read_variables(frame))
        block = compile_block(nested, source, shared, context)
        return TraceSite(
            code=code,
            block=block,
            names=shared | frozenset(block.stored),
            module_names=frozenset(block.stored) - own_names(code) if is_function(code) else frozenset(),
            does_nothing=all(map(_is_nothing, nested.body)),
            block_exit=self.layout(code).block_exit(frame.f_lasti, nested),
        )

    def _fits(self, source: SourceText, frame: FrameType) -> bool:
        nested = self._statement(frame, source)
        return nested is not None and matches(source.tree, frame.f_code, frame.f_globals, nested.node)

    def _statement(self, frame: FrameType, source: SourceText) -> Nested | None:
        """Return the innermost ``with`` item whose expression is the one that a frame has evaluated."""
        wanted = self.layout(frame.f_code).expression_before(frame.f_lasti)
        statements = _matching(source.tree, wanted, frame.f_lineno)
        return min(statements, key=lambda nested: _lines(nested.node), default=None)


class _Layout:
    """Positions of ``with`` statements in a code object's instructions, read once.

    During a call, a frame is at the first unit of the instruction or the last of its inline cache: all count.
    """

    def __init__(self, code: CodeType) -> None:
        """Note the calls whose result a ``with`` enters (``feeding``), and those whose result is dropped."""
        self.code = code  # referenced so that its id stays valid
        self.feeding: set[int] = set()
        self.dropped: set[int] = set()
        self._before: dict[int, Span] = {}
        instructions = list(dis.get_instructions(code))
        for index, instruction in enumerate(instructions[1:], start=1):
            previous = instructions[index - 1]
            if instruction.opname in _ENTERS:
                self.feeding.update(range(previous.offset, instruction.offset))
                self._before[instruction.offset] = _instruction_span(previous)
            elif instruction.opname == "POP_TOP":
                self.dropped.update(range(previous.offset, instruction.offset))
            elif instruction.opname.startswith("STORE_") and str(instruction.argval).startswith(WITH_MARKER):
                end = _expression_end(instructions, index)
                self.feeding.update(range(instructions[end].offset, instructions[end + 1].offset))

    def enters(self, offset: int) -> bool:
        return offset in self._before

    def expression_before(self, offset: int) -> Span:
        return self._before[offset]

    def block_exit(self, offset: int, nested: Nested) -> BlockExit:
        """Find where an error raised in the block of the ``with`` at ``offset`` reaches its ``__exit__``.

        That is behind the stores of ``as TARGET``. But a statement that the compiler turned into nothing,
        such as the line of a ``try:``, puts the block's first instruction under another handler than the
        stores have: then the block is left before ``as NAME`` is stored.
        """
        target = nested.node.items[nested.item].optional_vars
        name = target.id if isinstance(target, ast.Name) else None
        is_pattern = target is not None and name is None
        instructions = [
            instruction for instruction in dis.get_instructions(self.code) if instruction.offset > offset
        ]
        stores = instructions[:1]  # of a name, or a POP_TOP
        if target is not None and is_pattern:
            stores = [
                *itertools.takewhile(
                    lambda instruction: _holds(target, _instruction_span(instruction), 0), instructions
                )
            ]
        last_store, first_in_block = stores[-1].offset, instructions[len(stores)].offset
        handlers = {
            covered: entry.target
            for entry in dis.Bytecode(self.code).exception_entries  # type: ignore[attr-defined] # not in typeshed
            for covered in range(entry.start, entry.end, 2)
        }
        if handlers.get(first_in_block) == handlers.get(last_store):
            return BlockExit(after=last_store, at_once=_shares_line(nested), binds=None)
        if is_pattern:
            raise SyntaxError(
                f"a traced block cannot begin with this statement (line {nested.body[0].lineno}) while "
                "`as` binds more than a name; use a plain name, or put another statement first"
            )
        return BlockExit(after=offset, at_once=True, binds=name)


def _expression_end(instructions: list[dis.Instruction], store: int) -> int:
    """Return the index of the last instruction of EXPR in ``with (marker := bind(…, EXPR))``."""
    index = store - 1  # COPY, for the value that is entered
    while "CALL" not in instructions[index].opname:
        index -= 1
    while instructions[index - 1].opname in {"PRECALL", "KW_NAMES"}:
        index -= 1
    return index - 1


def _instruction_span(instruction: dis.Instruction) -> Span:
    """Return an instruction's first and last line and column, as ``Span``; None where unknown."""
    positions = instruction.positions
    if positions is None:
        return (None, None, None, None)
    return (positions.lineno, positions.end_lineno, positions.col_offset, positions.end_col_offset)


def _span(node: ast.expr) -> Span:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def _matching(tree: ast.AST, wanted: Span, line: int) -> Iterator[Nested]:
    """Yield the items of ``with`` statements whose expression has the position ``wanted``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            for index, item in enumerate(node.items):
                if _holds(item.context_expr, wanted, line):
                    yield Nested(node, index)


def _holds(node: ast.expr, wanted: Span, line: int) -> bool:
    """Return whether an expression contains the position ``wanted``; if that is unknown, ``line``."""
    first_line, last_line, column, end_column = wanted
    if first_line is None or last_line is None or column is None or end_column is None:
        return node.lineno <= line <= (node.end_lineno or node.lineno)  # run with -X no_debug_ranges
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= (first_line, column) and (last_line, end_column) <= end


def _shares_line(nested: Nested) -> bool:
    """Return whether other code follows on an item's last line, so that the block is left at once."""
    expression = nested.node.items[nested.item].context_expr
    rest = nested.node.items[nested.item + 1 :]
    following = rest[0].context_expr.lineno if rest else nested.node.body[0].lineno
    target = nested.node.items[nested.item].optional_vars
    last = target.end_lineno if target is not None else expression.end_lineno
    return following <= (last or expression.lineno)


def _is_nothing(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno


def _excerpt(filename: str, line: int, around: int = 4) -> str:
    """Return the lines around a line, which is marked, for an error message."""
    first_line = max(1, line - around)
    shown = linecache.getlines(filename)[first_line - 1 : line + around]
    return "\n".join(
        f"    {text.rstrip()}{'  <--- HERE' if number == line else ''}"
        for number, text in enumerate(shown, start=first_line)
    )


def _excerpt_of(frame: FrameType | None) -> str:
    return "" if frame is None else f" Called at {sent_name(frame.f_code.co_filename)}:{frame.f_lineno}."
