"""A detector: a float32 number per position. ``Detector.scores`` defines it; the worker computes the same."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32]


class Form(enum.StrEnum):
    LINEAR = "linear"
    MLP = "mlp"
    DISTANCE = "distance"


class Link(enum.StrEnum):
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
    """The value that a detector reads at one point, and its number.

    ``form``: LINEAR ``x·w``; MLP ``relu(H·x + h)·w``; DISTANCE ``-‖(x - mean)·scale‖``. ``tensors``: see
    ``TENSORS``.
    """

    point: str
    form: Form
    tensors: Mapping[str, Numbers]

    def values(self, x: Numbers) -> Numbers:
        """Return the part's number at each position, ``[positions]``, of values ``[positions, width]``."""
        tensors = self.tensors
        match self.form:
            case Form.LINEAR:
                scores = x @ tensors["weights"]
            case Form.MLP:
                hidden = np.maximum(x @ tensors["hidden_weights"].T + tensors["hidden_bias"], 0)
                scores = hidden @ tensors["weights"]
            case Form.DISTANCE:
                scores = -np.linalg.norm((x - tensors["mean"]) * tensors["scale"], axis=-1)
        return np.asarray(scores, np.float32)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Detector:
    """A sum of parts, a bias and a link; it holds from ``threshold`` on, None if there is no default."""

    parts: tuple[DetectorPart, ...]
    bias: float = 0.0
    link: Link = Link.IDENTITY
    threshold: float | None = None

    def scores(self, values: Mapping[str, Numbers]) -> Numbers:
        """Return the scores, ``[positions]``, of values ``[positions, width]`` by point."""
        total = sum((part.values(values[part.point]) for part in self.parts), np.float32(self.bias))
        return np.asarray(total if self.link is Link.IDENTITY else sigmoid(np.asarray(total)), np.float32)


def sigmoid(x: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))
