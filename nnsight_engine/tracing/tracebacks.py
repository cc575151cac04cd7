"""Tracebacks that users see: their own lines, none of our frames unless ``CONFIG.APP.DEBUG`` is on."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

import greenlet

import nnsight_engine
from nnsight_engine.core.config import CONFIG
from nnsight_engine.tracing.block_skipping import BlockSkipped
from nnsight_engine.tracing.sent_files import SentFile, sent_name

ErrorT = TypeVar("ErrorT", bound=BaseException)

_HIDDEN = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (nnsight_engine, greenlet))

_CALLED_BY_USERS = tuple(f"{_HIDDEN[0]}{part}{os.sep}" for part in ("envoys", "modeling", "tracing"))


def hide_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this package, and of the context managers that it enters."""
    kept: list[TracebackType] = []
    called_by_us = False
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        called_by_us = is_ours(filename) or (called_by_us and filename == contextlib.__file__)
        if not called_by_us:
            kept.append(traceback)
        traceback = traceback.tb_next
    result: TracebackType | None = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to this package (or to greenlet)."""
    return filename.startswith(_HIDDEN)


def users_stacklevel() -> int:
    """Return the ``stacklevel`` with which a warning of the caller names the user's line that called us."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - warnings offer no other way before Python 3.12
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def users_line() -> str:
    """Return the line of the user's that called us, in words: ``at line 3 of script.py: `code```."""
    frame = sys._getframe(1)  # noqa: SLF001 - the innermost of ours
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    if isinstance(file, SentFile):  # the text of no other file of that name
        text = file.line(number)
    else:
        text = linecache.getline(file, number, frame.f_globals)
    return f"at line {number} of {sent_name(file)}" + (f", `{text.strip()}`" if text else "")


def clean(error: BaseException, *, debug: bool) -> BaseException:
    """Remove our frames and the exception that skipped the block from an error and its causes; return it."""
    _forget_jump(error)
    if not debug:
        for one in _chain(error):
            one.__traceback__ = hide_our_frames(one.__traceback__)
    return error


def for_user(error: ErrorT) -> ErrorT:
    """Return an error to be raised at once by code that the user has called, outside of a block as a rule.

    None of ``_CALLED_BY_USERS`` may catch it; other parts of the package do, so for these it stays as it is.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the frame that raises
    while frame is not None and frame.f_code.co_filename.startswith(_CALLED_BY_USERS):
        frame = frame.f_back
    if frame is not None and not is_ours(frame.f_code.co_filename) and not CONFIG.APP.DEBUG:
        drop_callers(frame)
    return error


def drop_callers(frame: FrameType) -> None:
    """Remove the entries of our frames from the error that is about to reach ``frame`` from one of them.

    They exist only when the error arrives, so it takes a trace function, which then restores the previous
    one.
    """
    before, local = sys.gettrace(), frame.f_trace

    def arrived(running: FrameType, event: str, argument: Any) -> Any:
        if event != "exception":
            return arrived
        entry: TracebackType = argument[2]
        below = entry.tb_next
        while below is not None and is_ours(below.tb_frame.f_code.co_filename):
            below = below.tb_next
        entry.tb_next = below
        running.f_trace = local
        sys.settrace(before)
        return local

    frame.f_trace = arrived
    sys.settrace(_ignore)


def _ignore(_frame: FrameType, _event: str, _: Any) -> None: ...


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()  # they may form a cycle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _forget_jump(error: BaseException) -> None:
    seen: set[int] = set()  # contexts may form a cycle
    while error.__context__ is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error.__context__, BlockSkipped):
            error.__context__ = None
            return
        error = error.__context__
