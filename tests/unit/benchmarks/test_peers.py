"""The comparison with peers, without any: what counts as the same work, and what a table says of a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.case import NotMeasuredError, Plan
from benchmarks.peers import environment
from benchmarks.peers.environment import EnvironmentUnavailableError, ensure_environment
from benchmarks.peers.side import SideTasks
from benchmarks.peers.tasks import SMALL, NotOfferedError, Task, difference
from benchmarks.report import Results, Row
from benchmarks.runner import run
from benchmarks.tables.peers import OURS, PeerComparison, PeerSide

TASK = Task("one_value", "one value", SMALL)


class FakeSide:
    """Leaves a value and takes so long, or complains."""

    def __init__(self, name: str, folder: Path, value: float, seconds: dict[str, float]) -> None:
        self.name, self._file, self._value, self._seconds = name, folder / name, value, seconds

    def request(self, **command: Any) -> Any:
        if "prepare" in command:
            save_file({"0": torch.tensor([self._value])}, self._file)
            return {}
        if not self._seconds:
            raise NotMeasuredError("Broken: there")
        return {"seconds": self._seconds}


def rows_of(
    folder: Path, ours: FakeSide, peer: FakeSide | None, reference: FakeSide | None = None
) -> list[Row]:
    comparison = PeerComparison(0, TASK, ours, peer, reference, folder)  # type: ignore[arg-type] # fakes
    results = Results()
    run(Plan("peers", "", "", [comparison.case()]), 3, results.add)
    return results.rows()


def test_times_are_compared_within_a_repetition(tmp_path: Path) -> None:
    ours = FakeSide(OURS, tmp_path, 1.0, {"library": 3.0, "reference": 1.0})
    peer = FakeSide("peer", tmp_path, 1.0, {"library": 8.0, "reference": 2.0})
    assert rows_of(tmp_path, ours, None)[0].value == 3.0
    values = {row.measure: row.value for row in rows_of(tmp_path, ours, peer)}
    assert values == {
        "ours / peer": 0.375,
        "ours - reference, µs": 2e6,
        "peer - its reference, µs": 6e6,
        "difference of values read": 0.0,
    }


def test_a_side_can_be_the_reference_of_all(tmp_path: Path) -> None:
    ours = FakeSide(OURS, tmp_path, 1.0, {"library": 3.0})
    plain = FakeSide("plain", tmp_path, 1.0, {"library": 2.0})
    peer = FakeSide("peer", tmp_path, 1.0, {"library": 6.0})
    assert rows_of(tmp_path, ours, plain, plain)[0].value == 1.5
    assert [row.value for row in rows_of(tmp_path, ours, peer, plain)] == [0.5, 1e6, 4e6, 0.0]


def test_other_values_give_no_ratio(tmp_path: Path) -> None:
    times = {"library": 1.0, "reference": 1.0}
    rows = rows_of(tmp_path, FakeSide(OURS, tmp_path, 1.0, times), FakeSide("peer", tmp_path, 1.5, times))
    assert {(row.value, row.note[:20]) for row in rows} == {(None, "values differ, by 0.")}


def test_a_fault_is_a_note(tmp_path: Path) -> None:
    times = {"library": 2.0, "reference": 1.0}
    rows = rows_of(tmp_path, FakeSide(OURS, tmp_path, 1.0, times), FakeSide("peer", tmp_path, 1.0, {}))
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
    assert difference([torch.tensor(value)], [torch.tensor(other)]) == expected


def test_a_child_answers_what_it_cannot_do(tmp_path: Path) -> None:
    class Refusing:
        def one_value(self) -> None:
            raise ValueError("first\nsecond")

        def all_values(self) -> None:
            raise NotOfferedError("no invokes")

    side = SideTasks("local", {SMALL: Refusing()}, {}, tmp_path)
    assert side.answer(prepare=0, file="a") == {"error": "ValueError: first"}
    assert side.answer(prepare=1, file="a") == {"error": "no invokes"}
    assert side.answer(prepare=5, file="a") == {"error": "takes language models only"}
    assert "must be prepared" in side.answer(repeat=True)["error"]


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "install.sh"
    script.write_text("echo 'ERROR: no network' >&2; echo bye >&2; exit 1")
    monkeypatch.setattr(environment, "_INSTALL", script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with pytest.raises(EnvironmentUnavailableError, match="ERROR: no network"):
        ensure_environment(tmp_path)


def test_an_interpreter_that_is_missing_is_a_note(tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError, match="No such file"):
        PeerSide("local", "peer", str(tmp_path / "python"), tmp_path, 1)


def test_a_side_that_ends_says_with_what(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory >&2\nexit 7\n")
    python.chmod(0o755)
    with pytest.raises(NotMeasuredError, match="ended with status 7: out of memory"):
        PeerSide("local", "peer", str(python), tmp_path, 1)
