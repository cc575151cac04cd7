"""Calls of several sides by turns, each timed, so that other work of the machine affects all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

from benchmarks.case import Sample, Sampler

Side = Callable[[], object]

_MAX_CALLS: Final = 10
_TURN_S: Final = 0.002
"""Duration of one side's turn of several calls; a side that takes longer is called once."""

_WARMUP_ROUNDS: Final = 3
"""A trace's first call compiles its block, and allocators fill their pools."""


class CallsByTurns:
    """Calls every side a few times in a row, as in a loop, then the next; each round goes the other way.

    The median of each side's calls in a repetition counts. On a GPU a call ends when the GPU has done its
    work. A repetition has as many rounds as fit into ``repetition_s``, one at least.
    """

    def __init__(self, sides: Mapping[str, Side], repetition_s: float = 0.03) -> None:
        self._order = list(sides.items())
        self._has_gpu = torch.get_default_device().type == "cuda"
        self._seconds: dict[str, list[float]] = {name: [] for name in sides}
        self._num_calls = 1
        for _ in range(_WARMUP_ROUNDS):
            self._round()
        self._num_calls = min(_MAX_CALLS, max(1, round(_TURN_S * len(sides) / self._round())))
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
                if self._has_gpu:
                    torch.cuda.synchronize()
                self._seconds[name].append(time.perf_counter() - start)
        self._order.reverse()
        return time.perf_counter() - begin


def by_turns(sides: Mapping[str, Callable[[], Sample]], *, num_warmups: int = 1) -> Sampler:
    """Return a sampler that runs every side once, in an order that is reversed each time.

    A side returns its numbers by a suffix of its name. Repetitions of all sides warm up.
    """
    order = list(sides.items())

    def sample() -> Sample:
        numbers = {f"{name}{suffix}": number for name, side in order for suffix, number in side().items()}
        order.reverse()
        return numbers

    for _ in range(num_warmups):
        sample()
    return sample
