"""The end of a loop over steps, and the listener to reads of attributes."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar


class IterationOver(BaseException):
    """Generation is over while the loop over ``loop`` waits for its next step; only that loop ends.

    Not an ``Exception``, so that an ``except Exception`` in the block does not keep the loop alive.
    """

    def __init__(self, loop: Any) -> None:
        super().__init__("generation is over")
        self.loop = loop


class ReadListener:
    """The process-wide listener: called with the frame that reads, the owner, the property's name, the value.

    ``missing_is_none``: whether a value that a cache did not store is None, as in nnsight, and not an error.
    """

    listener: ClassVar[Callable[[FrameType, Any, str, Any], None] | None] = None
    missing_is_none: ClassVar[bool] = False
