"""Prediction, from earlier requests with the same block, of whether a step can be served at the taps.

Without it, a need for a value inside a layer is only discovered at a tap, and the step has to run twice.
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
        return block in self._elsewhere

    def note(self, block: CodeType, *, elsewhere: bool) -> None:
        self._elsewhere.pop(block, None)
        if elsewhere:
            self._elsewhere[block] = None
            if len(self._elsewhere) > _MAX_KNOWN:
                del self._elsewhere[next(iter(self._elsewhere))]
