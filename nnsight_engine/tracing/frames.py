"""The frame around a ``with`` block: the block is skipped there, and its variables are read and written.

An error raised before the block's first statement, which ``__exit__`` suppresses, skips it. A trace function
raises it. Debuggers and coverage tools use the same hook: their functions are restored.

Variables are read before a block runs, and written when its saved values are returned. Up to Python 3.12
``f_locals`` of a function is a copy that must be pushed back into the frame, from 3.13 on (PEP 667) it writes
through. Module-level frames, class bodies and ``exec`` use a real dict.

Tracebacks that users see: their own lines, none of our frames unless ``CONFIG.APP.DEBUG`` is on.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

import greenlet

import nnsight_engine
from nnsight_engine.core.config import CONFIG
from nnsight_engine.tracing.loaded_code import SentFile, sent_name

_CO_OPTIMIZED = 0x0001
_F_LOCALS_IS_A_COPY = sys.version_info < (3, 13)

_locals_to_fast = ctypes.pythonapi.PyFrame_LocalsToFast
_locals_to_fast.argtypes = (ctypes.py_object, ctypes.c_int)
_locals_to_fast.restype = None


def is_function(code: CodeType) -> bool:
    """Return whether ``code`` keeps its variables in fast slots, as functions do."""
    return bool(code.co_flags & _CO_OPTIMIZED)


def own_names(code: CodeType) -> frozenset[str]:
    """Return the names that are local to a function, captured ones included."""
    return frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))


def read_variables(frame: FrameType) -> Mapping[str, Any]:
    return frame.f_locals


def write_variables(
    frame: FrameType, values: dict[str, Any], module_names: frozenset[str] = frozenset()
) -> None:
    """Bind each name in the running frame; ``module_names``, which it declares ``global``, in its module."""
    if not values:
        return
    if module_names:
        frame.f_globals.update({name: values[name] for name in values.keys() & module_names})
        values = {name: value for name, value in values.items() if name not in module_names}
    frame.f_locals.update(values)
    if _F_LOCALS_IS_A_COPY and is_function(frame.f_code):
        _locals_to_fast(frame, 0)


class BlockSkipped(BaseException):
    """Raised before the first statement of a traced block, and suppressed by the trace's ``__exit__``."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockExit:
    """The place where a block is left.

    Attributes:
        after: Offset of the instruction after which the error is raised.
        at_once: Raise before the next instruction, not line: other code is on the line, or no later place
            reaches ``__exit__``.
        binds: The name after ``as``, if the block is left before it is stored.
    """

    after: int
    at_once: bool
    binds: str | None


def skip_block(frame: FrameType, block_exit: BlockExit) -> Callable[[], None] | None:
    """Make ``frame``, which is entering a ``with`` statement, raise ``BlockSkipped`` there.

    The result, if not None, restores the previous trace function. ``__exit__`` calls it, no sooner: Python
    removes a trace function that raises.
    """
    previous, local = sys.gettrace(), frame.f_trace
    if block_exit.at_once:
        opcodes, frame.f_trace_opcodes = frame.f_trace_opcodes, True
        frame.f_trace = _Leave(block_exit.after, opcodes)
    else:
        frame.f_trace = _Leave(block_exit.after, None)
    sys.settrace(_ignore)
    if previous is None:
        return None

    def put_back() -> None:
        frame.f_trace = local
        sys.settrace(previous)

    return put_back


class _Leave:
    """The trace function that raises; a function returning itself would be a reference cycle."""

    __slots__ = ("after", "opcodes")

    def __init__(self, after: int, opcodes: bool | None) -> None:  # noqa: FBT001 - a frame's attribute
        self.after = after
        self.opcodes = opcodes

    def __call__(self, frame: FrameType, _event: str, _: Any) -> Any:
        """Raise behind the instruction ``after``; Python calls this at each line, or at each instruction."""
        if frame.f_lasti <= self.after:
            return self
        if self.opcodes is not None:
            frame.f_trace_opcodes = self.opcodes
        raise BlockSkipped


def _ignore(_frame: FrameType, _event: str, _: Any) -> None: ...


ErrorT = TypeVar("ErrorT", bound=BaseException)

_HIDDEN = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (nnsight_engine, greenlet))

_CALLED_BY_USERS = tuple(f"{_HIDDEN[0]}{part}{os.sep}" for part in ("envoys", "modeling", "tracing"))


def hide_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this package, and of the context managers that it enters."""
    users_entries: list[TracebackType] = []
    called_by_us = False
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        called_by_us = is_ours(filename) or (called_by_us and filename == contextlib.__file__)
        if not called_by_us:
            users_entries.append(traceback)
        traceback = traceback.tb_next
    result: TracebackType | None = None
    for entry in reversed(users_entries):
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
        for exception in _chain(error):
            exception.__traceback__ = hide_our_frames(exception.__traceback__)
    return error


def for_user(error: ErrorT) -> ErrorT:
    """Return an error that code called by the user raises at once; it will reach them without our frames.

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
    previous_function, local = sys.gettrace(), frame.f_trace

    def arrived(running: FrameType, event: str, argument: Any) -> Any:
        if event != "exception":
            return arrived
        entry: TracebackType = argument[2]
        below = entry.tb_next
        while below is not None and is_ours(below.tb_frame.f_code.co_filename):
            below = below.tb_next
        entry.tb_next = below
        running.f_trace = local
        sys.settrace(previous_function)
        return local

    frame.f_trace = arrived
    sys.settrace(_ignore)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then what caused it or was handled when it was raised, and so on."""
    seen: set[int] = set()  # they may form a cycle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _forget_jump(error: BaseException) -> None:
    """Remove the ``BlockSkipped`` from an error's contexts."""
    seen: set[int] = set()  # contexts may form a cycle
    while error.__context__ is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error.__context__, BlockSkipped):
            error.__context__ = None
            return
        error = error.__context__
