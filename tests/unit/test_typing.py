"""A type checker takes what people write, and knows what it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def check(path: Path) -> str:
    """Return what mypy says about a file; its options are those of every other run, which share a cache."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(path)]
    said = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False).stdout
    return "".join(line for line in said.splitlines(keepends=True) if path.name in line.partition(":")[0])


def test_what_people_write_passes() -> None:
    assert check(PROJECT / "tests" / "typing" / "user_code.py") == ""


def test_a_name_that_is_not_ours_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("from nnsight_engine import NNsite\n")
    assert 'Module "nnsight_engine" has no attribute "NNsite"' in check(path)
