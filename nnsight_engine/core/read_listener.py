"""A listener to what blocks read, for the one mode of the library that has advice on it, see ``compat``."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar


class ReadListener:
    """Where the listener is kept; the process has one, as it has one ``import nnsight``.

    Attributes:
        listener: Is told who read which property of what, and got which value.
    """

    listener: ClassVar[Callable[[FrameType, Any, str, Any], None] | None] = None
