"""Prediction, from earlier requests with the same block, of whether a step can be served at the taps.

A block that reads a layer's output and then a value inside the next layer forces its first step to run twice,
because the second need is only discovered at the tap. The same blocks are sent again and again, often for a
single token each. From the second request on, the step is run eagerly from the start.
"""

from __future__ import annotations

from types import CodeType
from typing import Final

_MAX_KNOWN: Final = 256
"""Maximum number of blocks; beyond it the oldest are evicted."""


class TierPredictor:
    """The blocks that needed a value that no tap provides, in the first step of their latest request."""

    def __init__(self) -> None:
        self._elsewhere: dict[CodeType, None] = {}

    def expects_modules(self, block: CodeType) -> bool:
        """Return whether a block is expected to need values that no tap provides."""
        return block in self._elsewhere

    def note(self, block: CodeType, *, elsewhere: bool) -> None:
        """Record whether a block needed values that no tap provides."""
        self._elsewhere.pop(block, None)
        if elsewhere:
            self._elsewhere[block] = None
            if len(self._elsewhere) > _MAX_KNOWN:
                del self._elsewhere[next(iter(self._elsewhere))]
