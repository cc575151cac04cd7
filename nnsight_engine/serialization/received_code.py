"""Compilation of received source fragments, preserving their origin.

Used by the makers of code and blocks. Code is compiled with a ``SentFile`` as its file name: the lines shown
in errors, and nested blocks found at run time, are those of the fragment itself, even if a file on this
machine or of another sender has the same name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import CodeType
from typing import Final

from nnsight_engine.serialization.code_cache import CodeCache
from nnsight_engine.serialization.limits import Check
from nnsight_engine.serialization.source_cache import SHELF
from nnsight_engine.serialization.source_fragments import SourceFragment, tree_of
from nnsight_engine.tracing.sent_files import LinesFrom, SentFile

Compiler = Callable[[SourceFragment, tuple[str, ...], Check | None], CodeType]
_KEPT: Final[CodeCache[CodeType]] = CodeCache(512)


def compile_received(
    compiler: Compiler, piece: SourceFragment, variables: tuple[str, ...], check: Check | None
) -> CodeType:
    """Compile a fragment with a function of ``source_fragments``, or return the cached code.

    Raises:
        SyntaxError: The fragment is not valid Python, or defines something else.
        DecodeError: The check refuses it.
    """
    code = _KEPT.get(
        (compiler, piece, variables, check),
        piece.num_characters + sum(map(len, variables)),
        lambda: compiler(_named(piece), variables, check),
    )
    show(piece)
    return code


def show(piece: SourceFragment) -> None:
    """Register a fragment in ``linecache``."""
    SHELF.put(piece.filename, piece.line, piece.text)


def _named(piece: SourceFragment) -> SourceFragment:
    lines = LinesFrom(piece.line, piece.text)
    file = SentFile(piece.filename, lines, functools.partial(tree_of, piece))
    return dataclasses.replace(piece, filename=file)


__all__ = ["compile_received", "show"]
