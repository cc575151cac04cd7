"""Traced blocks, as the whole lines of their ``with`` statements.

Nested blocks are compiled from these lines, at the sender's columns.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Mapping
from types import CellType
from typing import Any, Final, NamedTuple

from nnsight_engine.serialization.graph import Decoder, Encoder, Kind, Written
from nnsight_engine.serialization.limits import Check, DecodeError
from nnsight_engine.serialization.message import NodeKind
from nnsight_engine.serialization.scopes import (
    bind_globals,
    bindings,
    cells_by_name,
    compiling,
    fragment_of,
    globals_of,
    write_cells,
    write_namespace,
)
from nnsight_engine.serialization.source.fragments import (
    FUTURE_FLAGS,
    WHOLE_LINES,
    SourceFragment,
    global_names,
    mentioned_in,
    statement_at,
)
from nnsight_engine.serialization.source.received_code import CodeCache, show
from nnsight_engine.tracing.blocks import HELPERS, Block, BlockContext, Nested, compile_block
from nnsight_engine.tracing.counted_stores import BIND
from nnsight_engine.tracing.loaded_code import LinesFrom, SentFile, sent_name
from nnsight_engine.tracing.source_text import SourceText
from nnsight_engine.tracing.tracer import Info


@dataclasses.dataclass(frozen=True, slots=True)
class SentBlock:
    """A block to send; a variable that ``cells`` lacks starts unbound, globals ``left_out`` are not sent."""

    info: Info
    cells: Mapping[str, CellType]
    left_out: frozenset[str] = frozenset()

    def variables(self, names: Iterable[str]) -> dict[str, CellType]:
        return {name: self.cells.get(name) or CellType() for name in names}


class BlockSource(NamedTuple):
    """The parts of an encoded block that depend on its code; ``item`` is the index of its ``with`` item."""

    fragment: tuple[Any, ...]
    item: int
    variables: tuple[str, ...]
    global_names: tuple[str, ...]
    mentioned: frozenset[str]


_SOURCES: Final[CodeCache[tuple[Block, BlockSource]]] = CodeCache(256)
"""Recently written blocks, by identity: a loop sends the same block repeatedly."""
_BLOCKS: Final[CodeCache[Block]] = CodeCache(256)


def _write_block(encoder: Encoder, value: SentBlock) -> Written:
    """Write a block: namespace, source, item and first argument, names and cells of variables, globals."""
    block, globals_ = value.info.block, value.info.globals_
    source = block_source(block)
    cells = value.variables(source.variables)
    encoder.mentioned |= source.mentioned
    names = [name for name in source.global_names if name not in value.left_out]
    return NodeKind.BLOCK, [
        encoder.node(globals_, writer=write_namespace),
        encoder.node(source.fragment),
        encoder.node((source.item, block.context.first_argument)),
        encoder.node(tuple(cells)),
        encoder.node(cells, writer=write_cells),
        *bindings(encoder, globals_, names),
    ]


def block_source(block: Block) -> BlockSource:
    return _SOURCES.get(id(block), 0, lambda: (block, _source_of(block)))[1]


def _source_of(block: Block) -> BlockSource:
    """Return what of a block depends on its code alone, without the names that compiling it has added."""
    fragment, item = _statement_of(block)
    return BlockSource(
        fragment=tuple(fragment),
        item=item,
        variables=tuple(sorted({*block.code.co_freevars, *block.stored} - {BIND, *HELPERS})),
        global_names=tuple(global_names(block.code)),
        mentioned=frozenset(mentioned_in(block.code)),
    )


def _statement_of(block: Block) -> tuple[SourceFragment, int]:
    """Return the text of a block's whole statement, and the index of the block's ``with`` item in it."""
    node, source, context = block.origin.node, block.source, block.context
    text = "".join(source.lines[node.lineno - 1 : node.end_lineno])
    fragment = SourceFragment(
        filename=sent_name(source.filename), text=text, line=node.lineno, column=WHOLE_LINES,
        name=context.name, qualname=context.name, class_name=context.class_name, flags=context.flags,
    )  # fmt: skip
    statement = statement_at(text, node.lineno, source.filename)
    # A block in `with A, B:` may hold the statement without its first items.
    num_before = len(statement.items) - len(node.items) if isinstance(statement, ast.With) else 0
    return fragment, num_before + block.origin.item


def _make_block(decoder: Decoder, parts: list[Any]) -> Info:
    """Compile a received block from the parts of ``_write_block``; ``_fill_block`` binds its globals."""
    module, fields, (item, first_argument), names, cells = parts
    if type(item) is not int or not isinstance(first_argument, str | None):
        raise DecodeError("the message is broken: a block is not that of a `with` statement")
    globals_, variables = globals_of(decoder, module), cells_by_name(names, cells)
    fragment = fragment_of(decoder, fields)
    with compiling(decoder, fragment):
        block = block_of(fragment, item, first_argument, frozenset(variables), decoder.policy.check)
    return Info(block, variables, None, globals_)


def block_of(
    fragment: SourceFragment,
    item: int,
    first_argument: str | None,
    variables: frozenset[str],
    check: Check | None = None,
) -> Block:
    """Return a statement's compiled block; cached, as it is often sent again with the next request."""

    def compiled() -> Block:
        statement = statement_at(fragment.text, fragment.line, fragment.filename)
        if not isinstance(statement, ast.With) or not 0 <= item < len(statement.items):
            raise DecodeError("the message is broken: a block is not that of a `with` statement")
        nested = Nested(statement, item)
        lines, tree = LinesFrom(fragment.line, fragment.text), ast.Module(body=[statement], type_ignores=[])
        file = SentFile(fragment.filename, lines, lambda: tree)
        if check is not None:
            check(nested, fragment.filename)
        flags = fragment.flags & FUTURE_FLAGS
        context = BlockContext(fragment.name, fragment.class_name, first_argument, flags)
        return compile_block(nested, SourceText(file, lines, tree), variables, context)

    key = (fragment, item, first_argument, variables, check)
    num_characters = fragment.num_characters + len(first_argument or "") + sum(map(len, variables))
    block = _BLOCKS.get(key, num_characters, compiled)
    show(fragment)
    return block


def _fill_block(_decoder: Decoder, value: Info, parts: list[Any]) -> None:
    names, *values = parts
    bind_globals(value.globals_, names, values)


BLOCK_KINDS: Final = (
    Kind(
        NodeKind.BLOCK,
        (SentBlock,),
        _write_block,
        first=(object,) * 5,
        make=_make_block,
        fill=_fill_block,
        partly=True,
        is_code=True,
    ),
)
