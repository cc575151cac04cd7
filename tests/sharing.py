"""Servers and engines that several modules of tests share: their tests run together, and they end in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Final, NoReturn, TypeVar

import pytest

from tests.parallel import group_of

T = TypeVar("T")
SHARED: Final = pytest.StashKey[dict[str, Callable[[], None]]]()
"""How to end the servers and engines that modules of ``tests/e2e`` share, by fixture."""


def shared(request: pytest.FixtureRequest, started: AbstractContextManager[T]) -> T:
    """Enter what the session's fixture of this name shares; it ends with its last test, or with the run."""
    stack = ExitStack()
    found = stack.enter_context(started)
    assert request.fixturename is not None
    request.session.stash.setdefault(SHARED, {})[request.fixturename] = stack.close
    request.addfinalizer(stack.close)
    return found


def fixtures_of(item: pytest.Item) -> Sequence[str]:
    """Return the fixtures that a test uses, itself or through others."""
    return getattr(item, "fixturenames", ())


def uses(fixture: str) -> Callable[[pytest.Item], bool]:
    """Return a function that tests whether a test uses a fixture."""
    return lambda item: fixture in fixtures_of(item)


def bring_together(items: list[pytest.Item], is_one: Callable[[pytest.Item], bool]) -> None:
    """Move whole modules that have such tests behind the first of them; the order is kept otherwise.

    Raises:
        UsageError: Two processes could run some of them each, and would both keep what they share to the end.
    """
    ones = [item for item in items if is_one(item)]
    groups = {group_of(item.nodeid) for item in ones}
    if len(groups) > 1:
        raise pytest.UsageError(f"tests that share what is expensive are to be one group, got {groups}")
    modules = {item.path for item in ones}
    first = next((index for index, item in enumerate(items) if item.path in modules), len(items))
    rest = items[first:]
    rest.sort(key=lambda item: item.path not in modules)
    items[first:] = rest


def is_last(item: pytest.Item, is_one: Callable[[pytest.Item], bool]) -> bool:
    """Return whether a test is the last such one of the run."""
    items = item.session.items
    return is_one(item) and not any(map(is_one, items[items.index(item) + 1 :]))


def lacking(request: pytest.FixtureRequest, option: str, why: str) -> NoReturn:
    """Skip what needs a program that is not installed; with this option of the command line, fail it."""
    (pytest.fail if request.config.getoption(option) else pytest.skip)(why)
