"""What a benchmark compares: cases, their measures, and the plan of a table.

A case has sides that do the same work. One repetition runs every side and yields a sample, one number for
each side. A measure relates a variant to a baseline within one sample, so that whatever else the machine does
affects both; tables show its median over all repetitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

Item = TypeVar("Item")

Sample = Mapping[str, float]
"""A number for each side of one repetition, times in seconds."""

Sampler = Callable[[], Sample]
"""Runs one repetition."""

SCALES: Final = {"µs": 1e6, "ms": 1e3, "s": 1.0}
"""Units in which times are shown; samples have seconds."""


class NotMeasuredError(Exception):
    """A case cannot be measured here. Its row shows the message, and the other cases go on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """What is computed from a case's samples.

    Attributes:
        name: Column of the table; names the variant and the baseline.
        of: Its value in one sample; tables show the median.
        target: The limit that the value has to keep, None where there is none.
        is_floor: Whether the target is a minimum; otherwise it is a maximum.
        bound: What limits the value, shown where the target is missed.
        of_all: Its value from all samples at once, for what has no value in one sample, such as a slope.
    """

    name: str
    of: Callable[[Sample], float] | None
    target: float | None = None
    is_floor: bool = False
    bound: str = ""
    of_all: Callable[[Sequence[Sample]], float | None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        name: What is done.
        size: How large it is.
        make: Prepares the sides, checks that they do the same work, and returns the sampler.
        measures: What is reported.
        unit: Unit of the sides' numbers in tables: one of ``SCALES``, or the samples' own.
        max_repeats: At most so many repetitions, for a case that takes long.
    """

    name: str
    size: str
    make: Callable[[], Sampler]
    measures: tuple[Measure, ...]
    unit: str = "µs"
    max_repeats: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One table.

    Attributes:
        name: Of the files, behind the date.
        title: Heading.
        method: How it was measured, in a few lines.
        cases: In the order of the table.
        in_rounds: Whether every round runs all cases once; otherwise each case is completed, and its memory
            freed, before the next one is prepared.
        versions: Of packages that are measured and not installed here.
    """

    name: str
    title: str
    method: str
    cases: Sequence[Case]
    in_rounds: bool = False
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def ratio(
    variant: str, baseline: str, target: float | None = None, *, is_floor: bool = False, bound: str = ""
) -> Measure:
    """Return the measure "variant as a multiple of baseline"."""
    return Measure(
        f"{variant} / {baseline}", lambda one: one[variant] / one[baseline], target, is_floor, bound
    )


def difference(variant: str, baseline: str, unit: str = "µs", target: float | None = None) -> Measure:
    """Return the measure "how much more time the variant takes", in a unit of ``SCALES``."""
    scale = SCALES[unit]
    return Measure(
        f"{variant} - {baseline}, {unit}", lambda one: scale * (one[variant] - one[baseline]), target
    )


def rotated(items: list[Item], by: int) -> list[Item]:
    """Return the items, starting with another one."""
    return items[by:] + items[:by]
