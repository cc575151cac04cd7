"""Skipping a ``with`` block: an error raised before its first statement, which ``__exit__`` suppresses.

A trace function raises it. Debuggers and coverage tools use the same hook: their functions are restored.
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
        if frame.f_lasti <= self.after:
            return self
        if self.opcodes is not None:
            frame.f_trace_opcodes = self.opcodes
        raise BlockSkipped


def _ignore(_frame: FrameType, _event: str, _: Any) -> None: ...
