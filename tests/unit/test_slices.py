"""Every heavy test runs in exactly one slice; slices are cut by measured durations."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.parallel import SHARED_FIXTURES, group_of
from tests.slices import Durations, slices_of

PROJECT = Path(__file__).resolve().parents[2]
GROUPS = st.sampled_from([f"tests/e2e/test_{letter}.py" for letter in "abcdefghij"])


@given(st.lists(GROUPS), st.dictionaries(GROUPS, st.floats(0, 1000)), st.integers(1, 12))
def test_slices_have_each_group_once_and_are_about_as_long(
    groups: list[str], seconds: dict[str, float], count: int
) -> None:
    slices = slices_of(groups, count, seconds)
    assert sorted(itertools.chain(*slices)) == sorted(set(groups))
    assert slices == slices_of(reversed(groups), count, seconds)
    lengths = [sum(seconds.get(group, 60) for group in one) for one in slices]
    assert max(lengths) - min(lengths) <= max((seconds.get(group, 60) for group in groups), default=0) + 1e-6


def test_a_run_plays_the_core_and_the_heavy_tests_of_its_slice(tmp_path: Path) -> None:
    """With modules of its own, in a process that has this project's hooks."""
    for name, number in (("a", 2), ("b", 2), ("c", 2)):
        heavy = "\n".join(f"@pytest.mark.heavy\ndef test_{i}() -> None: pass" for i in range(number))
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n{heavy}\ndef test_core() -> None: pass\n")

    def played(*options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-v"]
        command += [
            "-c",
            str(PROJECT / "pyproject.toml"),
            "--rootdir",
            str(tmp_path),
            *options,
            str(tmp_path),
        ]
        ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
        return set(re.findall(r"test_\w\.py::\w+", ran.stdout))

    core = {f"test_{name}.py::test_core" for name in "abc"}
    slices = [played("--slice", f"{number}/2") for number in (1, 2)]
    assert set.intersection(*slices) == core
    assert sorted(len(one - core) for one in slices) == [2, 4]
    assert Durations.read().next_slice > 0 or played("--slice", "next") == core


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
