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

from nnsight_engine.tracing.sent_files import LinesFrom, SentFile
from nnsight_engine.wire.kept import Kept
from nnsight_engine.wire.pieces import Piece, tree_of
from nnsight_engine.wire.rules import Rewrite
from nnsight_engine.wire.shelf import SHELF

Compiler = Callable[[Piece, tuple[str, ...], Rewrite | None], CodeType]
_KEPT: Final[Kept[CodeType]] = Kept(512)


def compile_received(
    compiler: Compiler, piece: Piece, variables: tuple[str, ...], rewrite: Rewrite | None
) -> CodeType:
    """Compile a piece with one of the functions of ``pieces``, or find it compiled already.

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


def show(piece: Piece, rewrite: Rewrite | None) -> None:
    """Show a piece's lines to Python's tools, which only code of a sender who is trusted can use."""
    if rewrite is None:
        SHELF.put(piece.filename, piece.line, piece.text)


def _named(piece: Piece, rewrite: Rewrite | None) -> Piece:
    lines = LinesFrom(piece.line, piece.text)
    tree = functools.partial(tree_of, piece, rewrite)
    file = SentFile(piece.filename, lines, tree, is_hidden=rewrite is not None)
    return dataclasses.replace(piece, filename=file)


__all__ = ["compile_received", "show"]
