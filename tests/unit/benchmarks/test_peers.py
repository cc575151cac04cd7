"""The comparison with peers, without any: what counts as the same work, and what a table says of a fault."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.case import NotMeasuredError, Plan
from benchmarks.peers import environment
from benchmarks.peers.environment import EnvironmentUnavailableError, ensure_environment
from benchmarks.peers.side import ComparedSide
from benchmarks.peers.tasks import SMALL, NotOfferedError, Task, difference
from benchmarks.report import Row, rows_of
from benchmarks.runner import run
from benchmarks.tables.peers import OURS, PeerSide, comparison

TASK = Task("one_value", "one value", SMALL)


class FakeSide:
    """Read a value and took so long, or complains."""

    def __init__(self, name: str, value: float, seconds: dict[str, float]) -> None:
        self.name, self._value, self._seconds = name, value, seconds

    def request(self, method: str, *_: Any) -> Any:
        if method == "prepare":
            return [np.array([self._value])]
        if not self._seconds:
            raise NotMeasuredError("Broken: there")
        return self._seconds


def measured(ours: FakeSide, peer: FakeSide | None, reference: FakeSide | None = None) -> list[Row]:
    case = comparison(0, TASK, ours, peer, reference)  # type: ignore[arg-type] # fakes
    *_, results = run(Plan([case]), 3)
    return rows_of([results])


def test_times_are_compared_within_a_repetition() -> None:
    ours = FakeSide(OURS, 1.0, {"": 3.0, " (hooks)": 1.0})
    peer = FakeSide("peer", 1.0, {"": 8.0, " (hooks)": 2.0})
    assert measured(ours, None)[0].value == 3.0
    values = {row.measure: row.value for row in measured(ours, peer)}
    assert values == {"ours / peer": 0.375, "ours - ours (hooks), µs": 2e6, "peer - peer (hooks), µs": 6e6}


def test_a_side_can_be_the_reference_of_all() -> None:
    ours, plain, peer = (
        FakeSide(OURS, 1, {"": 3}),
        FakeSide("plain", 1, {"": 2}),
        FakeSide("peer", 1, {"": 6}),
    )
    assert measured(ours, plain, plain)[0].value == 1.5
    assert [row.value for row in measured(ours, peer, plain)] == [0.5, 1e6, 4e6]


def test_other_values_give_no_ratio() -> None:
    times = {"": 1.0, " (hooks)": 1.0}
    rows = measured(FakeSide(OURS, 1.0, times), FakeSide("peer", 1.5, times))
    assert {(row.value, row.note[:20]) for row in rows} == {(None, "values differ, by 0.")}


def test_a_fault_is_a_note() -> None:
    rows = measured(FakeSide(OURS, 1.0, {"": 2.0, " (hooks)": 1.0}), FakeSide("peer", 1.0, {}))
    assert {(row.value, row.note) for row in rows} == {(None, "Broken: there")}


@pytest.mark.parametrize(
    ("value", "other", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([1.0], [1.0, 2.0], None),
        ([0.5], [0.0], 0.5),
    ],
)
def test_difference_is_a_share_of_the_largest(
    value: list[float], other: list[float], expected: float | None
) -> None:
    assert difference([np.array(value)], [np.array(other)]) == expected


def test_a_child_answers_what_it_cannot_do() -> None:
    def broken() -> list[torch.Tensor]:
        raise ValueError("first\nsecond")

    def not_offered() -> list[torch.Tensor]:
        raise NotOfferedError("no invokes")

    side = ComparedSide("local", {SMALL: {"one_value": broken, "all_values": not_offered}})
    assert side.answer("prepare", 0) == (None, "ValueError: first")
    assert side.answer("prepare", 1) == (None, "no invokes")
    assert side.answer("prepare", 5) == (None, "takes language models only")
    assert "must be prepared" in side.answer("repeat")[1]


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "install.sh"
    script.write_text("echo 'ERROR: no network' >&2; echo bye >&2; exit 1")
    monkeypatch.setattr(environment, "_INSTALL", script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with pytest.raises(EnvironmentUnavailableError, match="ERROR: no network"):
        ensure_environment(tmp_path)


def test_an_interpreter_that_is_missing_is_a_note(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack, pytest.raises(NotMeasuredError, match="No such file"):
        PeerSide("local", "peer", str(tmp_path / "python"), 1, stack)


def test_a_side_that_ends_says_with_what(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory >&2\nexit 7\n")
    python.chmod(0o755)
    match = "ended with status 7: out of memory"
    with contextlib.ExitStack() as stack, pytest.raises(NotMeasuredError, match=match):
        PeerSide("local", "peer", str(python), 1, stack)
