"""How sides of a comparison are timed: by turns, so that what the machine does beside meets all alike.

Sides are compared within a repetition, and a result is the median over repetitions. A repetition is made of
calls by turns, or, where a call takes seconds, of steps by turns: generations in threads of their own, of
which each waits while another one makes its next token.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

Side = Callable[[], object]
Sample = Mapping[str, float]
"""Seconds that each side took, in one repetition."""

Sampler = Callable[[], Sample]
"""Runs one repetition."""

Step = Callable[[], None]
"""Called by a side where it may wait for the others."""

_MOST_CALLS: Final = 10
"""Calls in a row, at most."""

_TURN_S: Final = 0.002
"""Seconds that the calls in a row take; a side that takes longer is called once."""

_WARM_ROUNDS: Final = 3
"""Rounds before the clock starts: a trace's first one compiles its block, allocators fill their pools."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """What is made of one repetition's times.

    Attributes:
        name: How tables call it.
        of: Its value.
        target: What it may be at most; None where nothing is promised.
        is_floor: Whether the target is what it may be at least, of a measure of which more is better.
    """

    name: str
    of: Callable[[Sample], float]
    target: float | None = None
    is_floor: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        name: What is done.
        size: How large it is.
        make: Makes the sides, checks that they do the same, and returns what times them.
        measures: What is reported of them.
    """

    name: str
    size: str
    make: Callable[[], Sampler]
    measures: tuple[Measure, ...]


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
        return min(self.values) if self.measure.is_floor else max(self.values)

    @property
    def reached(self) -> bool | None:
        """Whether the median keeps within the target, None where there is none."""
        target = self.measure.target
        if target is None:
            return None
        return self.value >= target if self.measure.is_floor else self.value <= target


def measure(case: Case, repeats: int) -> list[Row]:
    """Return a row for each of the case's measures."""
    sampler = case.make()
    samples = [sampler() for _ in range(repeats)]
    medians = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    return [Row(case, one, tuple(one.of(sample) for sample in samples), medians) for one in case.measures]


class CallsByTurns:
    """Calls every side a few times in a row, as in a loop, then the next; each round goes the other way.

    Of each side's calls in a repetition the median counts. On a GPU a call has ended when the GPU has.
    """

    def __init__(self, sides: Mapping[str, Side], repetition_s: float = 0.03) -> None:
        """Warm up.

        Args:
            sides: What is compared.
            repetition_s: Seconds of one repetition: as many rounds as fit, one at least.
        """
        self._order = list(sides.items())
        self._wait = torch.cuda.synchronize if torch.get_default_device().type == "cuda" else _nothing
        self._seconds: dict[str, list[float]] = {name: [] for name in sides}
        self._num_calls = 1
        for _ in range(_WARM_ROUNDS):
            self._round()
        self._num_calls = min(_MOST_CALLS, max(1, round(_TURN_S * len(sides) / self._round())))
        self._num_rounds = max(1, round(repetition_s / self._round()))

    def __call__(self) -> Sample:
        """Run one repetition."""
        gc.collect()
        for seconds in self._seconds.values():
            seconds.clear()
        for _ in range(self._num_rounds):
            self._round()
        return {name: statistics.median(seconds) for name, seconds in self._seconds.items()}

    def _round(self) -> float:
        """Run one round and return its seconds."""
        begin = time.perf_counter()
        for name, side in self._order:
            for _ in range(self._num_calls):
                start = time.perf_counter()
                side()
                self._wait()
                self._seconds[name].append(time.perf_counter() - start)
        self._order.reverse()
        return time.perf_counter() - begin


class StepsByTurns:
    """Runs every side in a thread of its own; one runs at a time, until its next step.

    The time of a side is that of its steps together; waiting is not part of it.
    """

    def __init__(self, sides: Mapping[str, Callable[[Step], object]], num_steps: int) -> None:
        """Warm up.

        Args:
            sides: What is compared; each is given what it calls at each step.
            num_steps: How often it does.
        """
        self._sides = sides
        self._num_turns = num_steps + 1
        self._reversed = False
        self()

    def __call__(self) -> Sample:
        """Run one repetition."""
        gc.collect()
        threads = {name: _Stepping(side) for name, side in self._sides.items()}
        for _ in range(self._num_turns):
            order = list(threads.values())
            for thread in reversed(order) if self._reversed else order:
                thread.go_on()
            self._reversed = not self._reversed
        return {name: thread.finish() for name, thread in threads.items()}


class _Stepping:
    """A side in its thread."""

    def __init__(self, side: Callable[[Step], object]) -> None:
        self._mine, self._others = threading.Semaphore(0), threading.Semaphore(0)
        self._seconds = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(side,), daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Let the side run up to its next step."""
        self._mine.release()
        self._others.acquire()
        if self._error is not None:
            raise self._error

    def finish(self) -> float:
        """Return the seconds that the side ran."""
        self._thread.join()
        return self._seconds

    def _run(self, side: Callable[[Step], object]) -> None:
        torch.set_num_threads(1)
        self._mine.acquire()
        self._start = time.perf_counter()
        try:
            side(self._step)
        except BaseException as error:  # noqa: BLE001 - raised by go_on, in the main thread
            self._error = error
        self._seconds += time.perf_counter() - self._start
        self._others.release()

    def _step(self) -> None:
        self._seconds += time.perf_counter() - self._start
        self._others.release()
        self._mine.acquire()
        self._start = time.perf_counter()


def _nothing() -> None:
    """Wait for nothing: on a CPU a call has ended when it returns."""


def ratio(ours: str, other: str, target: float | None = None) -> Measure:
    """Return the measure of how many times as long one side takes as another."""
    return Measure(f"{ours} / {other}", lambda sample: sample[ours] / sample[other], target)


def microseconds_over(ours: str, other: str, target: float | None = None) -> Measure:
    """Return the measure of how much longer one side takes than another, in microseconds."""
    return Measure(f"{ours} - {other}, µs", lambda sample: 1e6 * (sample[ours] - sample[other]), target)
