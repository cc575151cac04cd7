from __future__ import annotations

from typing import Any


class InterventionError(Exception):
    """One request fails, with a ``code`` of ``api_schemas.errors.ErrorCode``; other requests continue."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class UnsupportedOptionError(Exception):
    """An engine option under which interventions could be silently wrong; the message names the option."""


class IterationOver(BaseException):
    """Generation is over while the loop over ``loop`` waits for its next step; only that loop ends.

    Not an ``Exception``, so that an ``except Exception`` in the block does not keep the loop alive.
    """

    def __init__(self, loop: Any) -> None:
        super().__init__("generation is over")
        self.loop = loop
