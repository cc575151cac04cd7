"""How sides of a comparison are timed: by turns, so that what the machine does beside meets all alike.

In a round every side is called once, in an order that is mirrored from one round to the next. A repetition is
some rounds, of which each side's median call counts; sides are compared within a repetition, and a result is
the median over repetitions.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

Side = Callable[[], object]
Sample = Mapping[str, float]
"""Seconds of the median call of each side, in one repetition."""

_WARM_ROUNDS: Final = 3
"""Rounds before the clock starts: a trace's first one compiles its block, allocators fill their pools."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """What is made of one repetition's times.

    Attributes:
        name: How tables call it.
        of: Its value.
        target: What it may be at most; None where nothing is promised.
    """

    name: str
    of: Callable[[Sample], float]
    target: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        name: What is done.
        size: How large it is.
        make: Makes the sides, ``ours`` among them, and checks that they do the same.
        measures: What is reported of them.
        repetition_s: Seconds that one repetition takes: so many rounds as fit, one at least.
    """

    name: str
    size: str
    make: Callable[[], dict[str, Side]]
    measures: tuple[Measure, ...]
    repetition_s: float = 0.03


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One measure of one case.

    Attributes:
        case: The comparison.
        measure: What was made of the times.
        values: One for each repetition.
        medians: Seconds of one call of each side, median over repetitions.
    """

    case: Case
    measure: Measure
    values: tuple[float, ...]
    medians: dict[str, float]

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile; the extremes, if there are too few repetitions."""
        if len(self.values) < 4:
            return min(self.values), max(self.values)
        low, _, high = statistics.quantiles(self.values, n=4)
        return low, high

    @property
    def worst(self) -> float:
        """The worst repetition."""
        return max(self.values)

    @property
    def reached(self) -> bool | None:
        """Whether the median keeps within the target, None where there is none."""
        return None if self.measure.target is None else self.value <= self.measure.target


def measure(case: Case, repeats: int) -> list[Row]:
    """Return a row for each of the case's measures."""
    sides = case.make()
    rounds = _Rounds(sides)
    for _ in range(_WARM_ROUNDS):
        rounds.run()
    num_rounds = max(1, round(case.repetition_s / rounds.run()))
    samples = [rounds.repetition(num_rounds) for _ in range(repeats)]
    medians = {name: statistics.median(sample[name] for sample in samples) for name in sides}
    return [Row(case, one, tuple(one.of(sample) for sample in samples), medians) for one in case.measures]


class _Rounds:
    """Calls sides by turns, and keeps how long each call took."""

    def __init__(self, sides: Mapping[str, Side]) -> None:
        """Begin with the sides as given; each round goes the other way."""
        self._order = list(sides.items())
        self._seconds: dict[str, list[float]] = {name: [] for name in sides}

    def repetition(self, num_rounds: int) -> dict[str, float]:
        """Return the seconds of each side's median call in so many rounds."""
        gc.collect()
        for seconds in self._seconds.values():
            seconds.clear()
        for _ in range(num_rounds):
            self.run()
        return {name: statistics.median(seconds) for name, seconds in self._seconds.items()}

    def run(self) -> float:
        """Run one round and return its seconds."""
        begin = time.perf_counter()
        for name, side in self._order:
            start = time.perf_counter()
            side()
            self._seconds[name].append(time.perf_counter() - start)
        self._order.reverse()
        return time.perf_counter() - begin


def ratio(ours: str, other: str, target: float | None = None) -> Measure:
    """Return the measure of how many times as long one side takes as another."""
    return Measure(f"{ours} / {other}", lambda sample: sample[ours] / sample[other], target)


def microseconds_over(ours: str, other: str, target: float | None = None) -> Measure:
    """Return the measure of how much longer one side takes than another, in microseconds."""
    return Measure(f"{ours} - {other}, µs", lambda sample: 1e6 * (sample[ours] - sample[other]), target)
