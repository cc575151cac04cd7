from __future__ import annotations


class NoStandardPointsError(ValueError):
    """The model's architecture is in no table; only its own module paths can be used."""


class UnknownPointError(LookupError):
    """The model has standard points, but none of that name."""


class PointValueError(ValueError):
    """A value to be written to a point has the wrong type or shape."""


class PatternError(ValueError):
    """The model's attention implementation yields no probabilities, or would ignore written ones."""


class StateError(ValueError):
    """A recurrent state is not kept where the block runs, or was to be written."""

    @classmethod
    def unwritable(cls, name: str) -> StateError:
        return cls(
            f"{name} cannot be written: kernels update it in place, and read it before the next position. "
            "Write mixer.output behind it"
        )
