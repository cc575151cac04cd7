"""Writer of a traced block: the ``with`` statement that it belongs to, and the variables and globals it uses.

The statement is sent as whole lines: nested blocks are compiled from it, at the sender's columns.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from types import CellType
from typing import Any, Protocol

from nnsight_engine.serialization.encoding.encoder import Encoder, IdentityCache
from nnsight_engine.serialization.encoding.namespaces import bindings, write_cells, write_namespace
from nnsight_engine.serialization.message.node_kinds import NodeKind
from nnsight_engine.serialization.source.code_names import global_names, mentioned_in
from nnsight_engine.serialization.source.fragments import (
    WHOLE_LINES,
    SourceFragment,
    statement_at,
)
from nnsight_engine.tracing.blocks import HELPERS, Block
from nnsight_engine.tracing.counted_stores import BIND
from nnsight_engine.tracing.sent_files import sent_name
from nnsight_engine.tracing.tracer import Info


class _Sent(Protocol):
    @property
    def info(self) -> Info: ...

    @property
    def cells(self) -> Mapping[str, CellType]: ...

    @property
    def left_out(self) -> frozenset[str]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenBlock:
    """The parts of an encoded block that depend on its code; ``item`` is the index of its ``with`` item."""

    fragment: tuple[Any, ...]
    item: int
    variables: tuple[str, ...]
    global_names: tuple[str, ...]
    mentioned: frozenset[str]


_WRITTEN: IdentityCache[Block, WrittenBlock] = IdentityCache()
"""Recently written blocks: a loop sends the same block repeatedly."""


def write_sent_block(encoder: Encoder, index: int, value: Any) -> None:
    sent: _Sent = value
    block, globals_ = sent.info.block, sent.info.globals_
    written = written_block(block)
    cells = {name: sent.cells.get(name) or CellType() for name in written.variables}
    encoder.mentioned |= written.mentioned
    parts = [
        encoder.node(globals_, index, "", writer=write_namespace),
        encoder.node(written.fragment, index, ""),
        encoder.node((written.item, block.context.first_argument), index, ""),
        encoder.node(tuple(cells), index, ""),
        encoder.node(cells, index, "", writer=write_cells),
    ]
    names = [name for name in written.global_names if name not in sent.left_out]
    encoder.emit(index, NodeKind.BLOCK, parts + bindings(encoder, index, globals_, names))


def written_block(block: Block) -> WrittenBlock:
    known = _WRITTEN.get(block)
    if known is not None:
        return known
    fragment, item = _statement_of(block)
    written = WrittenBlock(
        fragment=fragment.parts(),
        item=item,
        variables=tuple(_variables_of(block)),
        global_names=tuple(global_names(block.code)),
        mentioned=frozenset(mentioned_in(block.code)),
    )
    return _WRITTEN.put(block, written)


def _variables_of(block: Block) -> list[str]:
    helpers = {BIND, *HELPERS}
    return sorted({*block.code.co_freevars, *block.stored} - helpers)


def _statement_of(block: Block) -> tuple[SourceFragment, int]:
    node, source, context = block.origin.node, block.source, block.context
    text = "".join(source.lines[node.lineno - 1 : node.end_lineno])
    fragment = SourceFragment(
        filename=sent_name(source.filename), text=text, line=node.lineno, column=WHOLE_LINES,
        name=context.name, qualname=context.name, class_name=context.class_name, flags=context.flags,
    )  # fmt: skip
    whole = statement_at(text, node.lineno, source.filename)
    # A block in `with A, B:` may hold the statement without its first items.
    num_before = len(whole.items) - len(node.items) if isinstance(whole, ast.With) else 0
    return fragment, num_before + block.origin.item
