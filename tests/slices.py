"""Which tests marked ``heavy`` run: none in ``make test``, all in ``make test-all``, one of six slices in CI.

A slice holds whole groups of ``tests.parallel``, so that modules that share a server are in one. The groups
are distributed by the durations in ``durations.json``, which a run with ``--record`` measures and writes. The
file also names the next slice: the choice follows from the checkout alone, and a recorded slice moves it on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import pytest

from tests.parallel import WORKER, group_of

COUNT: Final = 6
"""How many slices there are."""
DURATIONS: Final = Path(__file__).with_name("durations.json")
NEXT: Final = "next"
_SECONDS_OF_NEW_GROUPS: Final = 60
_FORM: Final = re.compile(r"(\d+)/(\d+)")


@dataclasses.dataclass(frozen=True)
class Durations:
    """What the last recorded runs measured.

    Attributes:
        next_slice: Number of the slice that was not recorded for the longest time, counted from 1. Before the
            first record it is 0, and no heavy test runs: nobody knows how long a slice takes.
        seconds: How long the heavy tests of each group took, by which slices are cut.
        measured: What slices took since the first of them was recorded. After the last one it replaces
            ``seconds``: cut anew in between, slices would have some groups twice, and others not.
    """

    next_slice: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = DURATIONS) -> Self:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path = DURATIONS) -> None:
        path.write_text(
            json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


@dataclasses.dataclass(frozen=True)
class Slice:
    """The ``number``-th of ``count`` slices, counted from 1; number 0 has no tests."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str, next_slice: int = 0) -> Self:
        """Read ``K/N`` or ``next``.

        Raises:
            UsageError: It has another form, or there is no such slice.
        """
        if text == NEXT:
            return cls(next_slice, COUNT)
        match = _FORM.fullmatch(text)
        number, count = (int(digits) for digits in match.groups()) if match else (0, 0)
        if not 1 <= number <= count:
            raise pytest.UsageError(
                f"--slice must be 'next' or K/N with 1 <= K <= N, got {text!r}; write 1/{COUNT}, for example"
            )
        return cls(number, count)


def slices_of(groups: Iterable[str], count: int, seconds: Mapping[str, float]) -> list[list[str]]:
    """Distribute groups over slices of about the same length: the longest first, to the shortest."""
    slices: list[list[str]] = [[] for _ in range(count)]
    lengths = [0.0] * count

    def length(group: str) -> float:
        return seconds.get(group, _SECONDS_OF_NEW_GROUPS)

    for group in sorted(set(groups), key=lambda group: (-length(group), group)):
        shortest = lengths.index(min(lengths))
        slices[shortest].append(group)
        lengths[shortest] += length(group)
    return slices


def is_heavy(item: pytest.Item) -> bool:
    """Return whether a test, its module or its parameter has the marker."""
    return item.get_closest_marker("heavy") is not None


def keep_slice(config: pytest.Config, items: list[pytest.Item], chosen: Slice) -> None:
    """Deselect the heavy tests of all other slices."""
    groups = {group_of(item.nodeid) for item in items if is_heavy(item)}
    slices = slices_of(groups, chosen.count, Durations.read().seconds)
    kept = {group for number, one in enumerate(slices, 1) if number == chosen.number for group in one}
    others = [item for item in items if is_heavy(item) and group_of(item.nodeid) not in kept]
    if others:
        dropped = set(others)
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=others)


class Recorder:
    """Measures the heavy tests of a run by group, and writes ``durations.json`` when it ends."""

    def __init__(self, chosen: Slice | None, path: Path = DURATIONS) -> None:
        self._chosen = chosen
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "heavy" in report.keywords:
            self._seconds[group_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        before = Durations.read(self._path)
        after, seconds = before.next_slice, before.seconds
        measured = {**before.measured, **{group: round(took, 1) for group, took in self._seconds.items()}}
        is_round_over = True
        if self._chosen is not None and self._chosen.count == COUNT:
            after = self._chosen.number % COUNT + 1
            is_round_over = after == 1
        if is_round_over:
            seconds, measured = {**seconds, **measured}, {}
        Durations(after, seconds, measured).write(self._path)


def add_options(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice",
        metavar="K/N|next",
        help=f"of the tests marked heavy, run the K-th of N slices only; next: the next of {COUNT}",
    )
    parser.addoption(
        "--record", action="store_true", help=f"write how long heavy tests take to {DURATIONS.name}"
    )


def chosen_slice(config: pytest.Config) -> Slice | None:
    """Return the slice that the command line names."""
    text: Any = config.getoption("--slice")
    return None if text is None else Slice.parse(text, Durations.read().next_slice)


def start_recording(config: pytest.Config) -> None:
    """Have a run with ``--record`` measure; of several processes, the one that the others report to."""
    if config.getoption("--record") and WORKER not in os.environ:
        config.pluginmanager.register(Recorder(chosen_slice(config)))


def header(config: pytest.Config) -> list[str]:
    """Return which of the heavy tests a run has, if it has a slice of them."""
    chosen = chosen_slice(config)
    if chosen is None:
        return []
    return [f"heavy tests: slice {chosen.number} of {chosen.count}" if chosen.number else "heavy tests: none"]
