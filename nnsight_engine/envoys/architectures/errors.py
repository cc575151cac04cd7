"""Errors of access to standard points."""

from __future__ import annotations


class NoStandardPointsError(ValueError):
    """The model's architecture is in no table; only its own module paths can be used."""


class UnknownPointError(LookupError):
    """The model has standard points, but none of that name."""


class PointValueError(ValueError):
    """A value to be written to a point has the wrong type or shape."""


class PatternError(ValueError):
    """The model's attention implementation yields no probabilities, or would ignore written ones."""
