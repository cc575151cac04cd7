"""Logistic regression with an L2 penalty, in float64, over the values at one layer or at several.

There are usually fewer samples than dimensions, so the linear systems that are solved have the size of the
samples. Deterministic: the same values give the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST: Final = 1e-9
"""The smallest standard deviation of a dimension that has an effect, relative to the largest."""
_PENALTY: Final = 0.01
"""L2 penalty on the weights, per sample; all dimensions together have variance one."""
_MAX_STEPS: Final = 100
_MAX_HALVINGS: Final = 30
_TOLERANCE: Final = 1e-9


class Standardised:
    """Values of one layer, with mean zero; the variances of all dimensions of all layers sum to one.

    So dimensions of large variance do not dominate, and constant ones have no effect.
    """

    def __init__(self, values: npt.NDArray[Any], num_dimensions: int) -> None:
        samples = np.asarray(values, np.float64)
        self.centre, deviation = samples.mean(axis=0), samples.std(axis=0)
        self.scale = np.maximum(deviation, LEAST * deviation.max()) * np.sqrt(num_dimensions)
        self.scaled: Floats = (samples - self.centre) / self.scale


def logistic(
    positive: Sequence[npt.NDArray[Any]], negative: Sequence[npt.NDArray[Any]]
) -> tuple[list[Floats], float]:
    """Return the weights of each layer, ``[width]``, and the bias, in logits, for ``[samples, width]``.

    Newton's method in the dual form: the weights are a combination of the samples. One layer is held in
    float64 at a time.
    """
    labels = np.concatenate((np.ones(len(positive[0])), np.zeros(len(negative[0]))))
    num_dimensions = sum(layer.shape[1] for layer in positive)

    def layers() -> Iterator[Standardised]:
        for sides in zip(positive, negative, strict=True):
            yield Standardised(np.concatenate(sides), num_dimensions)

    kernel = sum((one.scaled @ one.scaled.T for one in layers()), np.zeros((len(labels), len(labels))))
    combination, bias = _newton(kernel, labels, _PENALTY * len(labels))
    weights = []
    for one in layers():
        row = one.scaled.T @ combination / one.scale
        bias -= float(row @ one.centre)
        weights.append(row)
    return weights, bias


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


__all__ = ["LEAST", "Standardised", "logistic"]
