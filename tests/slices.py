"""Which tests marked ``heavy`` run: none in ``make test``, all in ``make test-all``, one slice of them in CI.

A slice holds whole groups of ``tests.parallel``, so that modules that share a server are in one. Which ones
follows from the names and the durations below alone: every process of a run finds the same, and the slices of
one count have each test once. So commits that take turns with them run every test.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Final, Self, TypeVar

import pytest

from tests.parallel import group_of

T = TypeVar("T")

SECONDS: Final = {
    "bundled_server": 70,
    "guide": 120,
    "keyed_server": 300,
    "playground": 270,
    "ray": 300,
    "tests/deploy/test_read_only.py": 85,
    "tests/docs/test_engine_pages.py": 220,
    "tests/e2e/test_certificate.py": 105,
    "tests/e2e/test_compile_cache.py": 130,
    "tests/e2e/test_compiled.py": 100,
    "tests/e2e/test_cuda_graphs.py": 90,
    "tests/e2e/test_data_parallel.py": 150,
    "tests/e2e/test_engine_kinds.py": 120,
    "tests/e2e/test_fair_scheduling.py": 160,
    "tests/e2e/test_families.py": 320,
    "tests/e2e/test_families_on_v2.py": 480,
    "tests/e2e/test_faults.py": 150,
    "tests/e2e/test_fuzz.py": 400,
    "tests/e2e/test_loadtests.py": 100,
    "tests/e2e/test_random_requests.py": 120,
    "tests/e2e/test_sandboxed_tensor_parallel.py": 120,
    "tests/e2e/test_traces_processes.py": 75,
    "tests/e2e/test_traces_tensor_parallel.py": 250,
}
"""How long the heavy tests of a group, or of a portion of a module, take alone: those of over a minute."""
HEAVY_GROUPS: Final = pytest.StashKey[set[str]]()
"""The groups that have heavy tests, among the tests that were collected."""
_SECONDS_OF_OTHERS: Final = 40
_FORM: Final = re.compile(r"(\d+)/(\d+)")


@dataclasses.dataclass(frozen=True)
class Slice:
    """The ``number``-th of ``count`` slices, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``K/N``.

        Raises:
            UsageError: It has another form, or there is no such slice.
        """
        match = _FORM.fullmatch(text)
        number, count = (int(digits) for digits in match.groups()) if match else (0, 0)
        if not 1 <= number <= count:
            raise pytest.UsageError(
                f"--slice must be K/N with 1 <= K <= N, got {text!r}; write 1/4, for example"
            )
        return cls(number, count)

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """Return its portion of what is cut into consecutive ones of about the same length."""
        return items[len(items) * (self.number - 1) // self.count : len(items) * self.number // self.count]


def slices_of(groups: Iterable[str], count: int) -> list[list[str]]:
    """Distribute groups over slices of about the same length.

    The longest group goes first, each to the shortest slice so far.
    """
    slices: list[list[str]] = [[] for _ in range(count)]
    lengths = [0] * count
    for group in sorted(set(groups), key=lambda group: (-_seconds(group), group)):
        shortest = lengths.index(min(lengths))
        slices[shortest].append(group)
        lengths[shortest] += _seconds(group)
    return slices


def is_heavy(item: pytest.Item) -> bool:
    """Return whether a test, its module or its parameter has the marker."""
    return item.get_closest_marker("heavy") is not None


def heavy_groups(items: Iterable[pytest.Item]) -> set[str]:
    """Return the groups that have heavy tests."""
    return {group_of(item.nodeid) for item in items if is_heavy(item)}


def keep_slice(config: pytest.Config, items: list[pytest.Item], chosen: Slice) -> None:
    """Deselect the heavy tests of all other slices."""
    groups = config.stash[HEAVY_GROUPS]
    kept = set(slices_of(groups, chosen.count)[chosen.number - 1])
    others = [item for item in items if is_heavy(item) and group_of(item.nodeid) not in kept]
    if others:
        dropped = set(others)
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=others)


def keep_portion(config: pytest.Config, items: list[pytest.Item], chosen: Slice) -> None:
    """Deselect all heavy tests, and of the others all but those of one portion.

    Raises:
        UsageError: A portion would be empty.
    """
    core = [item for item in items if not is_heavy(item)]
    if len(core) < chosen.count:
        raise pytest.UsageError(f"--portion: {len(core)} tests cannot be cut into {chosen.count} portions")
    kept = set(chosen.of(core))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _seconds(group: str) -> int:
    return SECONDS.get(group.partition(" ")[0], _SECONDS_OF_OTHERS)
