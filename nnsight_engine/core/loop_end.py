from __future__ import annotations

from typing import Any


class IterationOver(BaseException):
    """Generation is over while the loop over ``loop`` waits for its next step; only that loop ends.

    Not an ``Exception``, so that an ``except Exception`` in the block does not keep the loop alive.
    """

    def __init__(self, loop: Any) -> None:
        super().__init__("generation is over")
        self.loop = loop
