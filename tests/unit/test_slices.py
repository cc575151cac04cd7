"""Every heavy test runs in exactly one slice, and commits that follow each other run all slices."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel import SHARED_FIXTURES, group_of
from tests.slices import (
    HEAVY_GROUPS,
    SECONDS,
    Slice,
    heavy_groups,
    is_heavy,
    keep_portion,
    keep_slice,
    slices_of,
)

PROJECT = Path(__file__).resolve().parents[2]
COUNTS = range(1, 13)


class Item:
    """What selection reads of a test."""

    def __init__(self, nodeid: str, *, heavy: bool) -> None:
        self.nodeid = nodeid
        self._heavy = heavy

    def get_closest_marker(self, name: str) -> str | None:
        return name if self._heavy else None


class Config:
    """Records which tests are deselected."""

    def __init__(self) -> None:
        self.hook = self
        self.stash = pytest.Stash()
        self.deselected: list[Item] = []

    def pytest_deselected(self, items: list[Item]) -> None:
        self.deselected += items


def selected(items: list[Item], number: int, count: int) -> list[Item]:
    kept, config = list(items), Config()
    config.stash[HEAVY_GROUPS] = heavy_groups(cast(Any, items))
    keep_slice(cast(Any, config), cast(Any, kept), Slice(number, count))
    assert {*kept, *config.deselected} == set(items)
    assert len(kept) + len(config.deselected) == len(items)
    return kept


@given(st.lists(st.sampled_from([*SECONDS, *(f"tests/e2e/test_{letter}.py" for letter in "abcdefgh")])))
def test_slices_have_each_group_once(groups: list[str]) -> None:
    for count in COUNTS:
        slices = slices_of(groups, count)
        assert sorted(itertools.chain(*slices)) == sorted(set(groups))
        assert slices == slices_of(reversed(groups), count)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=20))
def test_each_slice_has_the_core_and_the_heavy_tests_of_whole_modules(tests: list[tuple[str, bool]]) -> None:
    items = [
        Item(f"tests/e2e/test_{module}.py::test_{number}", heavy=heavy)
        for number, (module, heavy) in enumerate(tests)
    ]
    core = [item for item in items if not is_heavy(cast(Any, item))]
    for count in COUNTS:
        heavy = []
        for number in range(1, count + 1):
            kept = selected(items, number, count)
            assert [item for item in kept if item in core] == core
            heavy.append([item for item in kept if item not in core])
        assert sorted(item.nodeid for one in heavy for item in one) == sorted(
            item.nodeid for item in items if item not in core
        )
        modules = [{group_of(item.nodeid) for item in one} for one in heavy]
        assert sum(map(len, modules)) == len(set().union(*modules))


def test_the_suite_s_heavy_tests_are_in_one_slice_each(request: pytest.FixtureRequest) -> None:
    """In a run of the whole suite; of a part of it, that part's."""
    groups = request.config.stash[HEAVY_GROUPS]
    for count in COUNTS:
        assert sorted(itertools.chain(*slices_of(groups, count))) == sorted(groups)


def test_durations_are_given_for_groups_that_there_are() -> None:
    files = [str(path.relative_to(PROJECT)) for path in PROJECT.glob("tests/**/test_*.py")]
    assert set(SECONDS) <= {group_of(file).partition(" ")[0] for file in files}


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "", "1/4/2", "-1/4"])
def test_a_slice_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="K/N with 1 <= K <= N"):
        Slice.parse(text)


def test_commits_that_follow_each_other_run_every_slice(tmp_path: Path) -> None:
    """With the script of CI in a repository of its own, and a ``make`` that says what it is asked for."""
    (tmp_path / ".ci").mkdir()
    for name in ("run", "turn"):
        shutil.copy(PROJECT / ".ci" / name, tmp_path / ".ci" / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "make").write_text('#!/bin/sh\necho "$@"\n')
    (programs / "make").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_DIR": str(tmp_path / ".git"),
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        )
        return done.stdout

    run("git", "init", "--quiet")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    chosen = []
    for number in range(12):
        run("git", *author, "commit", "--quiet", "--allow-empty", "-m", str(number))
        (slice_,) = [word for word in run(".ci/run").split() if word.startswith("SLICE=")]
        chosen.append(Slice.parse(slice_.removeprefix("SLICE=")))
    assert sorted(one.number for one in chosen) == list(range(1, 13))
    assert {one.count for one in chosen} == {12}


def test_portions_have_each_test_once() -> None:
    for count in COUNTS:
        portions = [list(Slice(number, count).of(range(10))) for number in range(1, count + 1)]
        assert list(itertools.chain(*portions)) == list(range(10))
        assert max(map(len, portions)) - min(map(len, portions)) <= 1


def test_portions_of_which_one_would_be_empty_are_refused() -> None:
    items = cast(Any, [Item(f"tests/e2e/test_a.py::test_{number}", heavy=number < 2) for number in range(5)])
    keep_portion(cast(Any, Config()), items, Slice(3, 3))
    assert [item.nodeid for item in items] == ["tests/e2e/test_a.py::test_4"]
    items = cast(Any, [Item(f"tests/e2e/test_a.py::test_{number}", heavy=number < 2) for number in range(5)])
    with pytest.raises(pytest.UsageError, match="3 tests cannot be cut into 4 portions"):
        keep_portion(cast(Any, Config()), items, Slice(1, 4))


def test_every_file_with_tests_is_collected() -> None:
    with_tests = {
        str(path.relative_to(PROJECT))
        for path in (PROJECT / "tests").rglob("*.py")
        if re.search(r"^(async )?def test_", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {name for name in with_tests if not Path(name).name.startswith("test_")} == set()


def test_modules_that_share_a_server_are_one_group() -> None:
    """A module that is in none ends a whole run, once all tests are collected."""
    for path in (PROJECT / "tests").rglob("test_*.py"):
        content = path.read_text(encoding="utf-8")
        for fixture in SHARED_FIXTURES:
            if re.search(rf"\b{fixture}: ", content):
                assert group_of(path.relative_to(PROJECT).as_posix()) == fixture
