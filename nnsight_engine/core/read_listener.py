from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar


class ReadListener:
    """The process-wide listener: called with the frame that reads, the owner, the property's name, the value.

    ``missing_is_none``: whether a value that a cache did not store is None, as in nnsight, and not an error.
    """

    listener: ClassVar[Callable[[FrameType, Any, str, Any], None] | None] = None
    missing_is_none: ClassVar[bool] = False
