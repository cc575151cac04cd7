"""The split of labelled examples into those that are trained on and those held out for scores."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class NothingToLearnError(ValueError):
    """The two sides do not differ, or their values are not finite."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The indices of the samples of each side that are trained on and held out."""

    positive: Indices
    negative: Indices
    held_positive: Indices
    held_negative: Indices


def split(num_positive: int, num_negative: int, *, holdout: float, seed: int) -> Split:
    """Return a split that holds out at least one sample of each side, and trains on at least one.

    Sides of equal size are treated as pairs, which stay together: if a pair's topic were on only one side
    of the training samples, the topic could be learned instead of the contrast.
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


__all__ = ["NothingToLearnError", "Split", "split"]
