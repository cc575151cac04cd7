"""The hook on attribute reads of blocks, used by the one mode that gives advice on them (see ``compat``)."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar


class ReadListener:
    """The holder of the process-wide listener; one suffices, as ``import nnsight`` is process-wide too.

    Attributes:
        listener: Called with the frame that reads, the owner, the property's name and the value.
    """

    listener: ClassVar[Callable[[FrameType, Any, str, Any], None] | None] = None
