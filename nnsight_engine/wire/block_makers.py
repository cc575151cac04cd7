"""How a block's node becomes a compiled block on cells; the other side of ``block_writers``."""

from __future__ import annotations

import ast
import functools
from types import ModuleType
from typing import Any

from nnsight_engine.tracing.blocks import Block, BlockContext, Nested, compile_block
from nnsight_engine.tracing.source_text import SourceText
from nnsight_engine.tracing.tracer import Info
from nnsight_engine.wire.code_makers import (
    bind_globals,
    cells_by_name,
    compiling,
    piece_of,
    refuse_source,
)
from nnsight_engine.wire.decoder import MISSING, Decoder, Maker
from nnsight_engine.wire.errors import DecodeError
from nnsight_engine.wire.kinds import Kind
from nnsight_engine.wire.pieces import FUTURE_FLAGS, LONGEST_KEPT, Piece, statement_at
from nnsight_engine.wire.rules import Rewrite
from nnsight_engine.wire.shelf import SHELF


def _make_block(decoder: Decoder, _index: int, parts: list[Any]) -> Info:
    refuse_source(decoder)
    module, fields, (item, first_argument), names, cells = parts
    if type(item) is not int or not isinstance(first_argument, str | None):
        raise DecodeError("the message is broken: a block is not that of a `with` statement")
    if not isinstance(module, ModuleType):
        raise DecodeError("the message is broken: a block has no namespace")
    variables = cells_by_name(decoder, names, cells)
    piece = piece_of(decoder, fields)
    with compiling(decoder, piece):
        block = block_of(piece, item, first_argument, frozenset(variables), decoder.policy.rules.rewrite)
    return Info(block, variables, None, vars(module))


def block_of(
    piece: Piece,
    item: int,
    first_argument: str | None,
    variables: frozenset[str],
    rewrite: Rewrite | None = None,
) -> Block:
    """Return a statement's block, compiled; its lines are shown to Python's tools.

    Raises:
        DecodeError: The piece is no ``with`` statement.
        SyntaxError: It is no Python.
    """
    compiled = _compiled if len(piece.text) <= LONGEST_KEPT else _compiled.__wrapped__
    block = compiled(piece, item, first_argument, variables, rewrite)
    SHELF.put(piece.filename, piece.line, piece.text)
    return block


@functools.lru_cache(maxsize=256)
def _compiled(
    piece: Piece,
    item: int,
    first_argument: str | None,
    variables: frozenset[str],
    rewrite: Rewrite | None,
) -> Block:
    """Return a statement's block; the same one often comes again, with the next request."""
    statement = statement_at(piece.text, piece.line, piece.filename)
    if not isinstance(statement, ast.With) or not 0 <= item < len(statement.items):
        raise DecodeError("the message is broken: a block is not that of a `with` statement")
    lines = tuple(f"{line}\n" for line in piece.text.removesuffix("\n").split("\n"))
    source = SourceText(
        piece.filename, ("\n",) * (piece.line - 1) + lines, ast.Module(body=[statement], type_ignores=[])
    )
    if rewrite is not None:
        rewrite(Nested(statement, item), piece.filename)
    context = BlockContext(piece.name, piece.class_name, first_argument, piece.flags & FUTURE_FLAGS)
    return compile_block(Nested(statement, item), source, variables, context)


def _fill_block(decoder: Decoder, value: Info, parts: list[Any]) -> None:
    names, *values = parts
    if names is not MISSING:
        bind_globals(decoder, value.globals_, names, values)


BLOCK_MAKERS: dict[Kind, Maker] = {Kind.BLOCK: Maker(_make_block, num_first=5, fill=_fill_block, partly=True)}
