"""The end of a loop over generation steps, told to the loop from deep inside its body."""

from __future__ import annotations

from typing import Any


class IterationOver(BaseException):
    """Generation is over while a loop over its steps waits for a value of the next one.

    Not an ``Exception``, so that a block's own ``except Exception`` does not keep the loop alive.

    Attributes:
        loop: The object that the loop runs over; only that loop ends.
    """

    def __init__(self, loop: Any) -> None:
        """Name the loop that ends."""
        super().__init__("generation is over")
        self.loop = loop
