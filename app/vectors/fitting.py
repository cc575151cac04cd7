"""Fitting one layer's row to values of contrasting prompts, in float64; deterministic."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from app.training.logistic import logistic
from app.training.scores import auroc, separation
from app.training.split import NothingToLearnError, Split

Method = Literal["mean_difference", "pca", "logistic"]
Floats = npt.NDArray[np.float64]

_LEAST: Final = 1e-9
"""Minimum length of a row, relative to the values' own length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """A layer's row and its scores, see ``api_schemas.vectors.LayerScore``."""

    row: npt.NDArray[np.float32]
    bias: float
    auroc: float
    accuracy: float
    separation: float

    @property
    def norm(self) -> float:
        return float(np.linalg.norm(self.row.astype(np.float64)))


def fit(positive: npt.ArrayLike, negative: npt.ArrayLike, chosen: Split, method: Method) -> Fitted:
    """Raise NothingToLearnError if the two sides, ``[samples, width]``, do not differ or are not finite."""
    towards, away = np.asarray(positive, np.float64), np.asarray(negative, np.float64)
    if not (np.isfinite(towards).all() and np.isfinite(away).all()):
        raise NothingToLearnError("the model's values there are not all numbers")
    trained = towards[chosen.positive], away[chosen.negative]
    size = float(np.sqrt(np.square(np.concatenate(trained)).sum(axis=1).mean()))
    difference = trained[0].mean(axis=0) - trained[1].mean(axis=0)
    if np.linalg.norm(difference) <= _LEAST * size:
        raise NothingToLearnError("the two sides do not differ there")
    vector, bias = _METHODS[method](*trained)
    row = vector.astype(np.float32)
    if not (np.isfinite(row).all() and row.any() and np.isfinite(bias)):
        raise NothingToLearnError("the difference of the two sides there is no direction in float32")
    kept = row.astype(np.float64)
    return Fitted(row, float(bias), *_scores((towards @ kept + bias, away @ kept + bias), chosen))


def _mean_difference(positive: Floats, negative: Floats) -> tuple[Floats, float]:
    vector = positive.mean(axis=0) - negative.mean(axis=0)
    return vector, _middle(vector, positive, negative)


def _pca(positive: Floats, negative: Floats) -> tuple[Floats, float]:
    """Return the first principal direction of the pairs' differences, scaled to their mean projection on it.

    The differences are not centred: their mean is the direction sought.
    """
    differences = positive - negative
    _, weights = np.linalg.eigh(differences @ differences.T)
    direction = differences.T @ weights[:, -1]
    direction /= np.linalg.norm(direction)
    vector = direction * (differences @ direction).mean()
    return vector, _middle(vector, positive, negative)


def _logistic(positive: Floats, negative: Floats) -> tuple[Floats, float]:
    (weights,), bias = logistic([positive], [negative])
    return weights, bias


_METHODS: Final = {"mean_difference": _mean_difference, "pca": _pca, "logistic": _logistic}


def _middle(vector: Floats, positive: Floats, negative: Floats) -> float:
    return -float(vector @ (positive.mean(axis=0) + negative.mean(axis=0))) / 2


def _scores(sides: tuple[Floats, Floats], chosen: Split) -> tuple[float, float, float]:
    positive, negative = sides[0][chosen.held_positive], sides[1][chosen.held_negative]
    right = int((positive > 0).sum() + (negative <= 0).sum())
    accuracy = right / (len(positive) + len(negative))
    return auroc(positive, negative), accuracy, separation((positive, negative), sides)


__all__ = ["Fitted", "Method", "fit"]
