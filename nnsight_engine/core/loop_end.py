"""The exception that ends a loop over generation steps from within its body."""

from __future__ import annotations

from typing import Any


class IterationOver(BaseException):
    """Generation is over while a loop over its steps waits for a value of the next one.

    Not an ``Exception``, so that an ``except Exception`` in the block does not keep the loop alive.

    Attributes:
        loop: The object that the loop iterates over; only that loop ends.
    """

    def __init__(self, loop: Any) -> None:
        super().__init__("generation is over")
        self.loop = loop
