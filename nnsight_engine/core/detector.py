"""A detector: a number for each position, computed from values at one or more points.

Numbers are float32. The worker computes the same on the device; ``Detector.scores`` is its definition.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32]


class Form(enum.StrEnum):
    """How a part of a detector computes a number from a value ``x``."""

    LINEAR = "linear"
    MLP = "mlp"
    DISTANCE = "distance"


class Link(enum.StrEnum):
    """The function from the sum of a detector's parts to its score."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"


TENSORS: Mapping[Form, tuple[str, ...]] = {
    Form.LINEAR: ("weights",),
    Form.MLP: ("hidden_weights", "hidden_bias", "weights"),
    Form.DISTANCE: ("mean", "scale"),
}
"""The tensors of each form.

LINEAR: ``weights [width]``. MLP: ``hidden_weights [hidden, width]``, ``hidden_bias [hidden]``, ``weights
[hidden]``. DISTANCE: ``mean [width]``, ``scale [width]``.
"""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DetectorPart:
    """What a detector reads at one point.

    Attributes:
        point: The point, ``layers.12.output``.
        form: LINEAR ``x·w``; MLP ``relu(H·x + h)·w``; DISTANCE ``-‖(x - mean)·scale‖``.
        tensors: The tensors by name, see ``TENSORS``.
    """

    point: str
    form: Form
    tensors: Mapping[str, Numbers]

    def values(self, x: Numbers) -> Numbers:
        """Return the part's numbers, ``[positions]``, of values ``[positions, width]``."""
        own = self.tensors
        match self.form:
            case Form.LINEAR:
                found = x @ own["weights"]
            case Form.MLP:
                hidden = np.maximum(x @ own["hidden_weights"].T + own["hidden_bias"], 0)
                found = hidden @ own["weights"]
            case Form.DISTANCE:
                found = -np.linalg.norm((x - own["mean"]) * own["scale"], axis=-1)
        return np.asarray(found, np.float32)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Detector:
    """A sum of parts, a bias and a link.

    Attributes:
        parts: Its parts, at different points.
        bias: Added to their sum.
        link: Applied to the sum.
        threshold: The score from which it is taken to hold; None if it has no default.
    """

    parts: tuple[DetectorPart, ...]
    bias: float = 0.0
    link: Link = Link.IDENTITY
    threshold: float | None = None

    def scores(self, values: Mapping[str, Numbers]) -> Numbers:
        """Return the scores, ``[positions]``, of values ``[positions, width]`` by point."""
        total = sum((part.values(values[part.point]) for part in self.parts), np.float32(self.bias))
        return np.asarray(total if self.link is Link.IDENTITY else sigmoid(np.asarray(total)), np.float32)


def sigmoid(x: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Return ``1 / (1 + exp(-x))`` without overflow."""
    return np.asarray(np.exp(-np.logaddexp(0, -x)))
