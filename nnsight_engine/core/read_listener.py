"""How attributes are read in the one mode that gives advice on them and follows nnsight (see ``compat``)."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar


class ReadListener:
    """The holder of the process-wide listener; one suffices, as ``import nnsight`` is process-wide too.

    Attributes:
        listener: Called with the frame that reads, the owner, the property's name and the value.
        missing_is_none: Whether a value that a cache did not store is None, as in nnsight, and not an error.
    """

    listener: ClassVar[Callable[[FrameType, Any, str, Any], None] | None] = None
    missing_is_none: ClassVar[bool] = False
