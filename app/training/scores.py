"""How well numbers separate two sides: the area under the ROC curve, its points, and the best threshold."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.floating[Any]]

_MAX_SEPARATION: Final = 1e6


class Cut(NamedTuple):
    """A point of the ROC curve: samples of at least ``threshold`` are taken for positive."""

    threshold: float
    tpr: float
    fpr: float


def auroc(positive: Scores, negative: Scores) -> float:
    """Return the probability that a positive number is larger than a negative one; equal ones count half."""
    differences = positive[:, None] - negative[None, :]
    return float((differences > 0).mean() + (differences == 0).mean() / 2)


def separation(held: tuple[Scores, Scores], everything: tuple[Scores, Scores]) -> float:
    """Return the distance of the held-out sides' means, in standard deviations within a side.

    Few samples are held out, so the deviation of each side is estimated from all of them.
    """
    deviation = float(np.sqrt((everything[0].var() + everything[1].var()) / 2))
    distance = float(held[0].mean() - held[1].mean())
    bound = _MAX_SEPARATION * deviation
    return distance / deviation if abs(distance) < bound else float(np.sign(distance)) * _MAX_SEPARATION


def roc(positive: npt.NDArray[np.float32], negative: npt.NDArray[np.float32]) -> list[Cut]:
    """Return the points of the ROC curve, one for each different number, from the highest threshold.

    A threshold lies half way to the next lower number, so that numbers a little lower than the samples count.
    """
    levels = np.unique(np.concatenate((positive, negative)))[::-1]
    halves = (levels[:-1] / 2 + levels[1:] / 2).astype(np.float32)
    # Between neighbours in float32 there is nothing.
    thresholds = np.append(np.where(halves > levels[1:], halves, levels[:-1]), levels[-1:])
    return [
        Cut(float(level), float((positive >= level).mean()), float((negative >= level).mean()))
        for level in thresholds
    ]


def best_cut(cuts: list[Cut]) -> Cut:
    """Return the point with the largest difference of ``tpr`` and ``fpr``; of equal ones, the strictest."""
    return max(cuts, key=lambda cut: cut.tpr - cut.fpr)


def thinned(cuts: list[Cut], most: int, keep: Cut) -> list[Cut]:
    """Return at most ``most`` points, evenly spread, with both ends and ``keep``."""
    if len(cuts) <= most:
        return cuts
    chosen = {cuts[round(index * (len(cuts) - 1) / (most - 2))] for index in range(most - 1)}
    return sorted(chosen | {keep}, key=lambda cut: -cut.threshold)


__all__ = ["Cut", "auroc", "best_cut", "roc", "separation", "thinned"]
