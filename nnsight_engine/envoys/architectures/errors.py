"""What can go wrong when a standard point is asked for."""

from __future__ import annotations


class NoStandardPointsError(ValueError):
    """The model's architecture is in no table, so that only its own module paths lead anywhere."""


class UnknownPointError(LookupError):
    """The model has standard points, and none of that name."""


class PointValueError(ValueError):
    """What is to be written to a point does not fit there."""


class PatternError(ValueError):
    """The way the model computes attention gives no probabilities, or would not use others."""
