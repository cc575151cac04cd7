"""Fitting a detector to values of labelled prompts; deterministic for the same values and seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from app.detectors.mlp import fit_mlp
from app.training.logistic import LEAST, logistic
from app.training.scores import Cut, auroc, best_cut, roc, separation, thinned
from app.training.split import NothingToLearnError, Split
from nnsight_engine.core.detector import Detector, DetectorPart, Form, Link, Numbers

Floats = npt.NDArray[np.float64]
Values = npt.NDArray[Any]

_MAX_CUTS: Final = 50
_PRIOR_SAMPLES: Final = 2
"""The weight of the variance of both sides together in that within them, in samples."""


@dataclasses.dataclass(frozen=True, slots=True)
class FittedDetector:
    """A detector, with its best threshold, and its scores on the held-out samples.

    ``separation`` is the distance of the sides before the link, in standard deviations within a side.
    """

    detector: Detector
    auroc: float
    separation: float
    cuts: list[Cut]


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    form: Form
    hidden: int
    seed: int


def fit(
    positive: Values, negative: Values, points: Sequence[str], chosen: Split, recipe: Recipe
) -> FittedDetector:
    """Fit a detector with a part at each point to two sides of ``[samples, points, width]``, and score it.

    Raises NothingToLearnError if the sides do not differ at a point, or the values are not finite.
    """
    if not (np.isfinite(positive).all() and np.isfinite(negative).all()):
        raise NothingToLearnError("the model's values there are not all numbers")
    trained = _by_point(positive[chosen.positive]), _by_point(negative[chosen.negative])
    for towards, away in zip(*trained, strict=True):
        _check_different(towards, away, recipe.form)
    detector = _FITS[recipe.form](*trained, points, recipe)
    numbers = [tensor for part in detector.parts for tensor in part.tensors.values()]
    if not (np.isfinite(detector.bias) and all(np.isfinite(tensor).all() for tensor in numbers)):
        raise NothingToLearnError(
            "the difference of the two sides there is too small or too large for float32"
        )
    return _scored(detector, (positive, negative), chosen)


def _by_point(values: Values) -> list[Values]:
    return [values[:, index] for index in range(values.shape[1])]


def _check_different(positive: Values, negative: Values, form: Form) -> None:
    towards, away = np.asarray(positive, np.float64), np.asarray(negative, np.float64)
    both = np.concatenate((towards, away))
    least = LEAST * float(np.sqrt(np.square(both).sum(axis=1).mean()))
    distance = np.linalg.norm(towards.mean(axis=0) - away.mean(axis=0))
    # A network may tell sides of one mean apart.
    if both.std(axis=0).max() <= least or (form is not Form.MLP and distance <= least):
        raise NothingToLearnError("the two sides do not differ there")


def _linear(
    positive: list[Values], negative: list[Values], points: Sequence[str], recipe: Recipe
) -> Detector:
    del recipe
    weights, bias = logistic(positive, negative)
    parts = [
        DetectorPart(point, Form.LINEAR, {"weights": _narrowed(row)})
        for point, row in zip(points, weights, strict=True)
    ]
    return Detector(tuple(parts), bias, Link.SIGMOID)


def _mlp(positive: list[Values], negative: list[Values], points: Sequence[str], recipe: Recipe) -> Detector:
    layers, bias = fit_mlp(positive, negative, hidden=recipe.hidden, seed=recipe.seed)
    parts = [
        DetectorPart(point, Form.MLP, {name: _narrowed(tensor) for name, tensor in layer.items()})
        for point, layer in zip(points, layers, strict=True)
    ]
    return Detector(tuple(parts), bias, Link.SIGMOID)


def _distance(
    positive: list[Values], negative: list[Values], points: Sequence[str], recipe: Recipe
) -> Detector:
    del recipe
    parts = [
        DetectorPart(point, Form.DISTANCE, {"mean": _narrowed(mean), "scale": _narrowed(scale)})
        for point, (mean, scale) in zip(points, map(_mean_and_scale, positive, negative), strict=True)
    ]
    return Detector(tuple(parts))


def _mean_and_scale(positive: Values, negative: Values) -> tuple[Floats, Floats]:
    """Return the mean of the positive side, and one over the standard deviation within the sides.

    Few samples say little about the deviation of one dimension, so that of both sides together counts too.
    A dimension that is constant counts nothing.
    """
    towards, away = np.asarray(positive, np.float64), np.asarray(negative, np.float64)
    both = np.concatenate((towards, away))
    within = len(towards) * towards.var(axis=0) + len(away) * away.var(axis=0)
    num_free = len(both) - 2
    variance = (within + _PRIOR_SAMPLES * both.var(axis=0)) / (num_free + _PRIOR_SAMPLES)
    deviation = np.sqrt(variance)
    varies = deviation > LEAST * deviation.max()
    return towards.mean(axis=0), np.where(varies, 1 / np.where(varies, deviation, 1.0), 0.0)


_FITS: Final = {Form.LINEAR: _linear, Form.MLP: _mlp, Form.DISTANCE: _distance}


def _narrowed(numbers: Floats) -> Numbers:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32)


def _scored(detector: Detector, sides: tuple[Values, Values], chosen: Split) -> FittedDetector:
    def both(of: Detector) -> tuple[Numbers, Numbers]:
        positive, negative = (
            of.scores({part.point: side[:, index] for index, part in enumerate(of.parts)}) for side in sides
        )
        return positive, negative

    with np.errstate(over="ignore", invalid="ignore"):
        totals, scores = both(dataclasses.replace(detector, link=Link.IDENTITY)), both(detector)
    if not all(np.isfinite(one).all() for one in totals):
        raise NothingToLearnError("the scores there are beyond float32")
    held = scores[0][chosen.held_positive], scores[1][chosen.held_negative]
    wide = totals[0].astype(np.float64), totals[1].astype(np.float64)
    cuts = roc(*held)
    best = best_cut(cuts)
    return FittedDetector(
        dataclasses.replace(detector, threshold=best.threshold),
        auroc(*held),
        separation((wide[0][chosen.held_positive], wide[1][chosen.held_negative]), wide),
        thinned(cuts, _MAX_CUTS, best),
    )


__all__ = ["FittedDetector", "Recipe", "fit"]
