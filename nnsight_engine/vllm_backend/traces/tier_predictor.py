"""What blocks wanted when they ran before, so that the same block's next request is run right at once.

A block that reads a layer and then something inside the next makes its first step run twice, once it turns
out. Blocks come again and again, often for one token; the second time, it is expected of them.
"""

from __future__ import annotations

from types import CodeType
from typing import Final

_MAX_KNOWN: Final = 256
"""The oldest are forgotten beyond."""


class TierPredictor:
    """Which blocks wanted what no tap provides, in the first step of the last request that ran them."""

    def __init__(self) -> None:
        """Know none."""
        self._elsewhere: dict[CodeType, None] = {}

    def expects_elsewhere(self, block: CodeType) -> bool:
        """Tell whether a block is one of them."""
        return block in self._elsewhere

    def note(self, block: CodeType, *, elsewhere: bool) -> None:
        """Take note of what a block wanted."""
        self._elsewhere.pop(block, None)
        if elsewhere:
            self._elsewhere[block] = None
            if len(self._elsewhere) > _MAX_KNOWN:
                del self._elsewhere[next(iter(self._elsewhere))]
