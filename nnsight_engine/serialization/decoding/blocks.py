from __future__ import annotations

import ast
from typing import Any, Final

from nnsight_engine.serialization.decoding.decoder import MISSING, Decoder, Maker
from nnsight_engine.serialization.decoding.definitions import (
    bind_globals,
    cells_by_name,
    compiling,
    fragment_of,
    globals_of,
    refuse_source,
)
from nnsight_engine.serialization.errors import DecodeError
from nnsight_engine.serialization.limits import Check
from nnsight_engine.serialization.message.node_kinds import NodeKind
from nnsight_engine.serialization.source.fragments import FUTURE_FLAGS, SourceFragment, statement_at
from nnsight_engine.serialization.source.received_code import CodeCache, show
from nnsight_engine.tracing.blocks import Block, BlockContext, Nested, compile_block
from nnsight_engine.tracing.sent_files import LinesFrom, SentFile
from nnsight_engine.tracing.source_text import SourceText
from nnsight_engine.tracing.tracer import Info

_CACHE: Final[CodeCache[Block]] = CodeCache(256)


def _make_block(decoder: Decoder, _index: int, parts: list[Any]) -> Info:
    refuse_source(decoder)
    module, fields, (item, first_argument), names, cells = parts
    if type(item) is not int or not isinstance(first_argument, str | None):
        raise DecodeError("the message is broken: a block is not that of a `with` statement")
    globals_ = globals_of(decoder, module)
    variables = cells_by_name(names, cells)
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
    block = _CACHE.get(
        (fragment, item, first_argument, variables, check),
        fragment.num_characters + len(first_argument or "") + sum(map(len, variables)),
        lambda: _compiled(fragment, item, first_argument, variables, check),
    )
    show(fragment)
    return block


def _compiled(
    fragment: SourceFragment,
    item: int,
    first_argument: str | None,
    variables: frozenset[str],
    check: Check | None,
) -> Block:
    statement = statement_at(fragment.text, fragment.line, fragment.filename)
    if not isinstance(statement, ast.With) or not 0 <= item < len(statement.items):
        raise DecodeError("the message is broken: a block is not that of a `with` statement")
    lines, tree = LinesFrom(fragment.line, fragment.text), ast.Module(body=[statement], type_ignores=[])
    file = SentFile(fragment.filename, lines, lambda: tree)
    if check is not None:
        check(Nested(statement, item), fragment.filename)
    context = BlockContext(fragment.name, fragment.class_name, first_argument, fragment.flags & FUTURE_FLAGS)
    return compile_block(Nested(statement, item), SourceText(file, lines, tree), variables, context)


def _fill_block(_decoder: Decoder, value: Info, parts: list[Any]) -> None:
    names, *values = parts
    if names is not MISSING:
        bind_globals(value.globals_, names, values)


BLOCK_MAKERS: dict[NodeKind, Maker] = {
    NodeKind.BLOCK: Maker(_make_block, num_first=5, fill=_fill_block, partly=True)
}
