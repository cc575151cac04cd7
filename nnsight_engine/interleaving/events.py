"""The events that a block hands to the model's side, and the errors that end a block's waiting."""

from __future__ import annotations

import enum
from typing import Any


class Events(enum.Enum):
    VALUE = "value"
    SWAP = "swap"
    SKIP = "skip"
    STEP = "step"
    BARRIER = "barrier"
    END = "end"
    EXCEPTION = "exception"


class Cancelation(Exception):  # noqa: N818 - the documented name
    """Raised in a block whose trace has ended, so that the block can clean up."""


class EarlyStopException(Exception):  # noqa: N818 - the documented name
    """Raised by ``tracer.stop()`` to end the block and the model's run."""


class SkipException(Exception):  # noqa: N818 - the documented name
    """A module's run is replaced by a value."""

    def __init__(self, value: Any) -> None:
        super().__init__("the module is skipped")
        self.value = value


class MissedProviderError(ValueError):
    """A value was not provided, and can no longer be; ``provider`` is its point, None if it has none."""

    provider: str | None = None


class StepNotReachedError(MissedProviderError):
    """A step that a block had advanced to with ``next()`` was not reached: the block ends, with a warning."""


class OutOfOrderError(MissedProviderError):
    """A value was requested after the model had passed its point."""


class ModelAborted(BaseException):
    """Unwinds the model after a block failed or stopped; no ``Exception``, which the model might catch."""
