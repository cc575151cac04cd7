"""Fitting one layer's row to values of contrasting prompts, and scoring it on the held-out ones.

All computation is in float64. There are usually fewer samples than dimensions, so the linear systems that are
solved have the size of the samples. Deterministic: the same values give the same row. Raises
``NothingToLearnError`` where the values carry no signal; ``training`` turns it into the request's error.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Method = Literal["mean_difference", "pca", "logistic"]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_LEAST: Final = 1e-9
"""Minimum length of a row, relative to the values' own length."""
_PENALTY: Final = 0.01
"""L2 penalty on the logistic probe's weights, per sample; all dimensions together have variance one."""
_MAX_STEPS: Final = 100
_MAX_HALVINGS: Final = 30
_TOLERANCE: Final = 1e-9
_MAX_SEPARATION: Final = 1e6


class NothingToLearnError(ValueError):
    """The two sides do not differ, or their values are not finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The indices of the samples of each side that are trained on and held out."""

    positive: Indices
    negative: Indices
    held_positive: Indices
    held_negative: Indices


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
        """The L2 norm of the row."""
        return float(np.linalg.norm(self.row.astype(np.float64)))


def split(num_positive: int, num_negative: int, *, holdout: float, seed: int) -> Split:
    """Return a split that holds out at least one sample of each side, and trains on at least one.

    Sides of equal size are treated as pairs, which stay together: if a pair's topic were on only one side
    of the training samples, the topic could be learned instead of the contrast.

    Args:
        num_positive: The number of samples of one side, two or more.
        num_negative: The number of the other.
        holdout: The fraction that is held out, at most one half.
        seed: Selects the samples.
    """
    random = np.random.default_rng(seed)
    positive = random.permutation(num_positive)
    negative = positive if num_positive == num_negative else random.permutation(num_negative)

    def num_held(count: int) -> int:
        return min(max(1, round(holdout * count)), count - 1)

    held_positive, held_negative = num_held(num_positive), num_held(num_negative)
    return Split(
        np.sort(positive[held_positive:]),
        np.sort(negative[held_negative:]),
        np.sort(positive[:held_positive]),
        np.sort(negative[:held_negative]),
    )


def fit(positive: npt.ArrayLike, negative: npt.ArrayLike, chosen: Split, method: Method) -> Fitted:
    """Fit a layer's row and score it.

    Args:
        positive: Values of one side, ``[samples, width]``.
        negative: Values of the other.
        chosen: The split.
        method: See ``api_schemas.vectors.TrainingRequest``.

    Raises:
        NothingToLearnError: The sides do not differ, or the values are not finite.
    """
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
    """Return the weights and the bias of an L2-regularized logistic regression.

    Newton's method in the dual form: the weights are a combination of the samples, so the linear systems have
    as many unknowns as there are samples, not as there are dimensions.
    """
    samples = np.concatenate((positive, negative))
    labels = np.concatenate((np.ones(len(positive)), np.zeros(len(negative))))
    centre, deviation = samples.mean(axis=0), samples.std(axis=0)
    # Dimensions are standardized, so that those of large variance do not dominate; constant ones have no
    # effect.
    scale = np.maximum(deviation, _LEAST * deviation.max()) * np.sqrt(samples.shape[1])
    scaled = (samples - centre) / scale
    combination, offset = _newton(scaled @ scaled.T, labels, _PENALTY * len(labels))
    weights = scaled.T @ combination / scale
    return weights, offset - float(weights @ centre)


def _newton(kernel: Floats, labels: Floats, penalty: float) -> tuple[Floats, float]:
    """Minimise the logistic loss of ``kernel @ a + b`` plus ``penalty / 2 * a @ kernel @ a``."""
    count = len(labels)
    found = np.zeros(count + 1)

    def loss(at: Floats) -> float:
        logits = kernel @ at[:-1] + at[-1]
        return float(
            np.logaddexp(0, logits).sum() - labels @ logits + penalty / 2 * at[:-1] @ kernel @ at[:-1]
        )

    best = loss(found)
    for _ in range(_MAX_STEPS):
        logits = kernel @ found[:-1] + found[-1]
        chances = 1 / (1 + np.exp(-np.clip(logits, -500, 500)))
        curvature = np.maximum(chances * (1 - chances), 1e-12)
        system = np.zeros((count + 1, count + 1))
        system[:-1, :-1] = kernel + np.diag(penalty / curvature)
        system[:-1, -1] = system[-1, :-1] = 1.0
        target = np.append(logits + (labels - chances) / curvature, 0.0)
        step = np.linalg.solve(system, target) - found
        size = 1.0
        for _ in range(_MAX_HALVINGS):
            if loss(found + size * step) <= best:
                break
            size /= 2
        found = found + size * step
        previous, best = best, loss(found)
        if previous - best <= _TOLERANCE * max(1.0, abs(best)):
            break
    return found[:-1], float(found[-1])


_METHODS: Final = {"mean_difference": _mean_difference, "pca": _pca, "logistic": _logistic}


def _middle(vector: Floats, positive: Floats, negative: Floats) -> float:
    return -float(vector @ (positive.mean(axis=0) + negative.mean(axis=0))) / 2


def _scores(sides: tuple[Floats, Floats], chosen: Split) -> tuple[float, float, float]:
    """Return the AUROC, accuracy and separation (in standard deviations) of the held-out samples."""
    positive, negative = sides[0][chosen.held_positive], sides[1][chosen.held_negative]
    differences = positive[:, None] - negative[None, :]
    auroc = float((differences > 0).mean() + (differences == 0).mean() / 2)
    right = int((positive > 0).sum() + (negative <= 0).sum())
    accuracy = right / (len(positive) + len(negative))
    # Few samples are held out, so the deviation of each side is estimated from all of them.
    deviation = float(np.sqrt((sides[0].var() + sides[1].var()) / 2))
    distance = float(positive.mean() - negative.mean())
    bound = _MAX_SEPARATION * deviation
    separation = distance / deviation if abs(distance) < bound else float(np.sign(distance)) * _MAX_SEPARATION
    return auroc, accuracy, separation


__all__ = ["Fitted", "Method", "NothingToLearnError", "Split", "fit", "split"]
