"""Skipping a ``with`` block before its first statement.

Python offers a context manager no way to skip its block. But an error raised *inside* the block reaches
``__exit__``, which may suppress it. A trace function, which Python calls before the next line of a frame
runs, raises that error. Debuggers and coverage tools use the same hook, so their trace functions are
restored.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class BlockSkipped(BaseException):
    """Raised before the first statement of a traced block, and suppressed by the trace's ``__exit__``."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockExit:
    """The place where a block is left.

    Attributes:
        after: Offset of the instruction after which the error is raised.
        at_once: Raise before the next instruction rather than the next line, because other code stands on
            the same line, or no later place reaches ``__exit__``.
        binds: The name after ``as``, if the block is left before it is stored.
    """

    after: int
    at_once: bool
    binds: str | None


def skip_block(frame: FrameType, block_exit: BlockExit) -> Callable[[], None] | None:
    """Make ``frame``, which is entering a ``with`` statement, raise ``BlockSkipped`` there.

    Returns:
        A function that restores the previous trace function, to be called by ``__exit__``; None if there was
        none. Python removes a trace function that raises, so it cannot be restored sooner.
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
        if frame.f_lasti <= self.after:
            return self
        if self.opcodes is not None:
            frame.f_trace_opcodes = self.opcodes
        raise BlockSkipped


def _ignore(_frame: FrameType, _event: str, _: Any) -> None:
    """Do not trace the calls made in between: returning from ``__enter__`` makes some."""
