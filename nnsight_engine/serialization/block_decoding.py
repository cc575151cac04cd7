"""Maker of compiled blocks with their variables; the counterpart of ``block_encoding``."""

from __future__ import annotations

import ast
from typing import Any, Final

from nnsight_engine.serialization.code_cache import CodeCache
from nnsight_engine.serialization.code_decoding import (
    bind_globals,
    cells_by_name,
    compiling,
    globals_of,
    piece_of,
    refuse_source,
)
from nnsight_engine.serialization.decoder import MISSING, Decoder, Maker
from nnsight_engine.serialization.errors import DecodeError
from nnsight_engine.serialization.limits import Check
from nnsight_engine.serialization.node_kinds import NodeKind
from nnsight_engine.serialization.received_code import show
from nnsight_engine.serialization.source_fragments import FUTURE_FLAGS, SourceFragment, statement_at
from nnsight_engine.tracing.blocks import Block, BlockContext, Nested, compile_block
from nnsight_engine.tracing.sent_files import LinesFrom, SentFile
from nnsight_engine.tracing.source_text import SourceText
from nnsight_engine.tracing.tracer import Info

_KEPT: Final[CodeCache[Block]] = CodeCache(256)


def _make_block(decoder: Decoder, _index: int, parts: list[Any]) -> Info:
    refuse_source(decoder)
    module, fields, (item, first_argument), names, cells = parts
    if type(item) is not int or not isinstance(first_argument, str | None):
        raise DecodeError("the message is broken: a block is not that of a `with` statement")
    globals_ = globals_of(decoder, module)
    variables = cells_by_name(names, cells)
    piece = piece_of(decoder, fields)
    with compiling(decoder, piece):
        block = block_of(piece, item, first_argument, frozenset(variables), decoder.policy.check)
    return Info(block, variables, None, globals_)


def block_of(
    piece: SourceFragment,
    item: int,
    first_argument: str | None,
    variables: frozenset[str],
    check: Check | None = None,
) -> Block:
    """Return a statement's compiled block; cached, as it is often sent again with the next request.

    Raises:
        DecodeError: The fragment is not a ``with`` statement.
        SyntaxError: It is not valid Python.
    """
    block = _KEPT.get(
        (piece, item, first_argument, variables, check),
        piece.num_characters + len(first_argument or "") + sum(map(len, variables)),
        lambda: _compiled(piece, item, first_argument, variables, check),
    )
    show(piece)
    return block


def _compiled(
    piece: SourceFragment,
    item: int,
    first_argument: str | None,
    variables: frozenset[str],
    check: Check | None,
) -> Block:
    statement = statement_at(piece.text, piece.line, piece.filename)
    if not isinstance(statement, ast.With) or not 0 <= item < len(statement.items):
        raise DecodeError("the message is broken: a block is not that of a `with` statement")
    lines, tree = LinesFrom(piece.line, piece.text), ast.Module(body=[statement], type_ignores=[])
    file = SentFile(piece.filename, lines, lambda: tree)
    if check is not None:
        check(Nested(statement, item), piece.filename)
    context = BlockContext(piece.name, piece.class_name, first_argument, piece.flags & FUTURE_FLAGS)
    return compile_block(Nested(statement, item), SourceText(file, lines, tree), variables, context)


def _fill_block(_decoder: Decoder, value: Info, parts: list[Any]) -> None:
    names, *values = parts
    if names is not MISSING:
        bind_globals(value.globals_, names, values)


BLOCK_MAKERS: dict[NodeKind, Maker] = {
    NodeKind.BLOCK: Maker(_make_block, num_first=5, fill=_fill_block, partly=True)
}
