"""Leaving a ``with`` block before its first statement.

Python offers a context manager no way to skip its block. But an error raised *inside* the block reaches
``__exit__``, which may swallow it. A trace function, which Python calls before the next line of a frame runs,
raises that error, and takes itself away first. Debuggers and coverage use the same hook: theirs is put back.
"""

from __future__ import annotations

import dataclasses
import sys
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


def skip_block(frame: FrameType, way_out: WayOut) -> None:
    """Make ``frame``, which is entering a ``with`` statement, raise ``BlockSkipped`` there."""
    after, at_once = way_out.after, way_out.at_once
    previous, local = sys.gettrace(), frame.f_trace

    def leave(running: FrameType, _event: str, _: Any) -> Any:
        if running.f_lasti <= after:
            return leave
        if at_once:
            running.f_trace_opcodes = opcodes
        running.f_trace = local
        sys.settrace(previous)
        raise BlockSkipped

    opcodes = False
    if at_once:
        opcodes, frame.f_trace_opcodes = frame.f_trace_opcodes, True
    frame.f_trace = leave
    sys.settrace(_ignore)


def _ignore(_frame: FrameType, _event: str, _: Any) -> None:
    """Trace no call made on the way: leaving ``__enter__`` makes some."""
