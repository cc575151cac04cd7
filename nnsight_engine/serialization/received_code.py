"""Compiling pieces of source that were received, so that their code knows where it came from.

Used by the makers of code and blocks. Code is compiled under a ``SentFile``: the lines that errors show, and
the blocks that are found in it as it runs, are those of the piece itself, whatever file of this machine or of
another sender has the same name. Code that is changed for want of trust gets a name that is no path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import CodeType
from typing import Final

from nnsight_engine.serialization.code_cache import CodeCache
from nnsight_engine.serialization.rules import Rewrite
from nnsight_engine.serialization.source_cache import SHELF
from nnsight_engine.serialization.source_fragments import SourceFragment, tree_of
from nnsight_engine.tracing.sent_files import LinesFrom, SentFile

Compiler = Callable[[SourceFragment, tuple[str, ...], Rewrite | None], CodeType]
_KEPT: Final[CodeCache[CodeType]] = CodeCache(512)


def compile_received(
    compiler: Compiler, piece: SourceFragment, variables: tuple[str, ...], rewrite: Rewrite | None
) -> CodeType:
    """Compile a piece with one of the functions of ``source_fragments``, or find it compiled already.

    Raises:
        SyntaxError: It is no Python, or defines something else.
    """
    code = _KEPT.get(
        (compiler, piece, variables, rewrite),
        piece.num_characters + sum(map(len, variables)),
        lambda: compiler(_named(piece, rewrite), variables, rewrite),
    )
    show(piece, rewrite)
    return code


def show(piece: SourceFragment, rewrite: Rewrite | None) -> None:
    """Show a piece's lines to Python's tools, which only code of a sender who is trusted can use."""
    if rewrite is None:
        SHELF.put(piece.filename, piece.line, piece.text)


def _named(piece: SourceFragment, rewrite: Rewrite | None) -> SourceFragment:
    lines = LinesFrom(piece.line, piece.text)
    tree = functools.partial(tree_of, piece, rewrite)
    file = SentFile(piece.filename, lines, tree, is_hidden=rewrite is not None)
    return dataclasses.replace(piece, filename=file)


__all__ = ["compile_received", "show"]
