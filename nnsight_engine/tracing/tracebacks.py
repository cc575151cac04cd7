"""Errors as the user sees them: their own type, their own file and line, none of our frames.

Blocks are compiled with the names and lines of the user's file, so a traceback needs no translation. It does
pass through this package, whose frames say nothing to the person reading, and they are left out unless
``CONFIG.APP.DEBUG`` is on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import greenlet

import nnsight_engine
from nnsight_engine.tracing.skipping import BlockSkipped

_HIDDEN = tuple(str(Path(module.__file__ or "").parent) for module in (nnsight_engine, greenlet))


def hide_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this package."""
    kept: list[TracebackType] = []
    while traceback is not None:
        if not is_ours(traceback.tb_frame.f_code.co_filename):
            kept.append(traceback)
        traceback = traceback.tb_next
    result: TracebackType | None = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def is_ours(filename: str) -> bool:
    """Tell whether a file belongs to this package."""
    return filename.startswith(_HIDDEN)


def raise_clean(error: BaseException, *, debug: bool) -> NoReturn:
    """Raise ``error`` with our frames left out and its own cause and context kept.

    Raising inside ``__exit__`` would make the jump that skipped the block the error's context, so what the
    error had before is put back. A block that ran under ``__exit__`` had that jump as a context all along.
    """
    _forget_jump(error)
    context, suppressed = error.__context__, error.__suppress_context__
    if not debug:
        error.__traceback__ = hide_our_frames(error.__traceback__)
    try:
        raise error
    finally:
        error.__context__, error.__suppress_context__ = context, suppressed


def _forget_jump(error: BaseException) -> None:
    seen: set[int] = set()
    while error.__context__ is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error.__context__, BlockSkipped):
            error.__context__ = None
            return
        error = error.__context__


def guarded(work: Callable[[], object], *, debug: bool) -> object:
    """Call ``work``; an error leaves it clean."""
    try:
        return work()
    except BaseException as error:  # noqa: BLE001 - raised again, whatever it is
        failed = error
    raise_clean(failed, debug=debug)
