"""The model of all benchmarks: a table has cases, a case has measures.

A case has sides that do the same work. One repetition runs every side and yields a sample, one number for
each side. A measure relates a variant to a baseline within one sample, so that other work of the machine
affects both; tables show its median over all repetitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

Sample = Mapping[str, float]
"""A number for each side of one repetition, times in seconds."""

Sampler = Callable[[], Sample]
"""Runs one repetition."""

SCALES: Final = {"µs": 1e6, "ms": 1e3, "s": 1.0}
"""Units in which times are shown."""


class NotMeasuredError(Exception):
    """A case cannot be measured here. Its row shows the message, and the other cases go on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """A number computed from a case's samples; made by the functions below.

    Attributes:
        of: The value in some samples; tables show the median over single ones unless it ``takes_all``.
        target: The limit of the value, a minimum if ``is_floor``, otherwise a maximum.
        bound: The reason of the limit, shown where the target is missed.
    """

    name: str
    of: Callable[[Sequence[Sample]], float | None]
    target: float | None = None
    is_floor: bool = False
    bound: str = ""
    takes_all: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """One comparison.

    Attributes:
        make: Prepares the sides, checks that they do the same work, and returns the sampler.
        unit: Unit of the sides' numbers in tables: one of ``SCALES``, or the samples' own.
        max_repeats: Most repetitions, for a case that takes long.
    """

    name: str
    size: str
    make: Callable[[], Sampler]
    measures: tuple[Measure, ...]
    unit: str = "µs"
    max_repeats: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The cases of a table.

    Attributes:
        suffix: Part of the table's name that its options add.
        in_rounds: Whether every round runs all cases once; otherwise each case is completed, and its memory
            freed, before the next one is prepared.
        versions: Versions of packages that are measured and not installed here.
        text: The docstring of the table's module, a title and the method; set by the runner.
    """

    cases: Sequence[BenchmarkCase]
    suffix: str = ""
    in_rounds: bool = False
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    text: str = ""


def ratio(
    variant: str, baseline: str, target: float | None = None, *, is_floor: bool = False, bound: str = ""
) -> Measure:
    """Return the measure "variant as a multiple of baseline"."""
    return Measure(f"{variant} / {baseline}", partial(_ratio, variant, baseline), target, is_floor, bound)


def difference(variant: str, baseline: str, unit: str = "µs", target: float | None = None) -> Measure:
    """Return the measure "additional time of the variant", in a unit of ``SCALES``."""
    return total(f"{variant} - {baseline}, {unit}", {variant: 1, baseline: -1}, SCALES[unit], target)


def total(
    name: str,
    weights: Mapping[str, float],
    scale: float = 1.0,
    target: float | None = None,
    bound: str = "",
) -> Measure:
    """Return a weighted sum of sides."""
    return Measure(name, partial(_total, weights, scale), target, bound=bound)


def slope(sizes: Sequence[int], target: float, bound: str = "") -> Measure:
    """Return the power of a size by which the cost grows; sides are ``with, SIZE`` and ``without, SIZE``."""
    return Measure("slope", partial(growth_power, sizes), target, bound=bound, takes_all=True)


def growth_power(sizes: Sequence[int], samples: Sequence[Sample]) -> float | None:
    """Return the power of the size by which costs grow; None where fewer than two stand out of the noise."""
    costs = {size: [one[f"with, {size}"] - one[f"without, {size}"] for one in samples] for size in sizes}
    medians = {size: float(np.median(own)) for size, own in costs.items() if np.quantile(own, 0.25) > 0}
    if len(medians) < 2:
        return None
    return float(np.polyfit(np.log(list(medians)), np.log(list(medians.values())), 1)[0])


def _ratio(variant: str, baseline: str, samples: Sequence[Sample]) -> float:
    return float(np.median([one[variant] / one[baseline] for one in samples]))


def _total(weights: Mapping[str, float], scale: float, samples: Sequence[Sample]) -> float:
    sums = [sum(weight * one[side] for side, weight in weights.items()) for one in samples]
    return float(scale * np.median(sums))
