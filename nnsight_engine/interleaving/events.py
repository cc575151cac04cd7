"""What a block may tell the model's side, and how waiting can end.

Errors derive from the types that people already catch: a value that never came is a ``ValueError``.
"""

from __future__ import annotations

import enum
from typing import Any


class Events(enum.Enum):
    """What a block asks for when it hands control to the model's side."""

    VALUE = "value"
    SWAP = "swap"
    SKIP = "skip"
    STEP = "step"
    BARRIER = "barrier"
    END = "end"
    EXCEPTION = "exception"


class Cancelation(Exception):  # noqa: N818 - the documented name
    """Raised in a block whose trace ended without it: it can only clean up."""


class EarlyStopException(Exception):  # noqa: N818 - the documented name
    """Raised by ``tracer.stop()`` to end the block and the model's run."""


class SkipException(Exception):  # noqa: N818 - the documented name
    """A module's run is replaced by a value."""

    def __init__(self, value: Any) -> None:
        """Keep the value that stands for the module's output."""
        super().__init__("the module is skipped")
        self.value = value


class MissedProviderError(ValueError):
    """A value that a block asked for was not provided, and can no longer come.

    Attributes:
        provider: The place whose value it was, if a place's.
    """

    provider: str | None = None


class StepNotReachedError(MissedProviderError):
    """A step that a block had moved on to with ``next()`` did not come: the block ends, with a warning."""


class OutOfOrderError(MissedProviderError):
    """A value was asked for after the model had passed it."""


class ModelAborted(BaseException):
    """Unwinds the model once a block has failed or stopped it.

    Not an ``Exception``, so that a model's own ``except Exception`` does not carry on with the run.
    """
