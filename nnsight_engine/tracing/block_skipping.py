"""Leaving a ``with`` block before its first statement.

Python offers a context manager no way to skip its block. But an error raised *inside* the block reaches
``__exit__``, which may swallow it. A trace function, which Python calls before the next line of a frame runs,
raises that error. Debuggers and coverage use the same hook: theirs is put back.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class BlockSkipped(BaseException):
    """Raised before the first statement of a traced block, and swallowed by the trace's ``__exit__``."""


@dataclasses.dataclass(frozen=True, slots=True)
class WayOut:
    """Where a block can be left.

    Attributes:
        after: Offset of the instruction after which the error is raised.
        at_once: Raise before the very next instruction rather than the next line, because something else
            stands on the same line, or no later place will do.
        binds: The name after ``as``, if the block is left before it is stored.
    """

    after: int
    at_once: bool
    binds: str | None


def skip_block(frame: FrameType, way_out: WayOut) -> Callable[[], None] | None:
    """Make ``frame``, which is entering a ``with`` statement, raise ``BlockSkipped`` there.

    Returns:
        What ``__exit__`` must call to put back the trace function that was active, if one was. Python drops
        any that raises, so it cannot be done sooner.
    """
    previous, local = sys.gettrace(), frame.f_trace
    if way_out.at_once:
        opcodes, frame.f_trace_opcodes = frame.f_trace_opcodes, True
        frame.f_trace = _Leave(way_out.after, opcodes)
    else:
        frame.f_trace = _Leave(way_out.after, None)
    sys.settrace(_ignore)
    if previous is None:
        return None

    def put_back() -> None:
        frame.f_trace = local
        sys.settrace(previous)

    return put_back


class _Leave:
    """The trace function that leaves; an object, since a function that returns itself would be a cycle."""

    __slots__ = ("after", "opcodes")

    def __init__(self, after: int, opcodes: bool | None) -> None:  # noqa: FBT001 - what a frame's attribute was
        self.after = after
        self.opcodes = opcodes

    def __call__(self, frame: FrameType, _event: str, _: Any) -> Any:
        if frame.f_lasti <= self.after:
            return self
        if self.opcodes is not None:
            frame.f_trace_opcodes = self.opcodes
        raise BlockSkipped


def _ignore(_frame: FrameType, _event: str, _: Any) -> None:
    """Trace no call made on the way: leaving ``__enter__`` makes some."""
