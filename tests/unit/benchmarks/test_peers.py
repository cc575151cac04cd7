"""The comparison with peers, without any: what counts as the same work, and what a table says of a fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.machine import describe_machine
from benchmarks.peers import environment
from benchmarks.peers.child import Conversation
from benchmarks.peers.comparing import OURS, Row, compare
from benchmarks.peers.environment import EnvironmentUnavailableError, ensure_environment
from benchmarks.peers.parent import SideError, SideProcess
from benchmarks.peers.report import Report
from benchmarks.peers.tasks import SMALL, NotOfferedError, Task, difference
from benchmarks.processes import Event

TASK = Task("one_value", "one | value", SMALL)


class FakeSide:
    """Leaves a value and takes so long, or complains."""

    def __init__(self, name: str, folder: Path, value: float, seconds: dict[str, float]) -> None:
        self.name, self._file, self._value, self._seconds = name, folder / name, value, seconds

    def ask(self, request: Event) -> Event:
        if "prepare" in request:
            save_file({"0": torch.tensor([self._value])}, self._file)
            return {"num_values": 1}
        if not self._seconds:
            raise SideError("Broken: there")
        return {"seconds": self._seconds}


def rows_of(folder: Path, *sides: FakeSide, reference: str = "hooks") -> list[Row]:
    return compare(0, TASK, sides, folder, reference=reference, repeats=3)  # type: ignore[arg-type] # fakes


def test_times_are_compared_within_a_repetition(tmp_path: Path) -> None:
    ours = FakeSide(OURS, tmp_path, 1.0, {"library": 3.0, "reference": 1.0})
    peer = FakeSide("peer", tmp_path, 1.0, {"library": 8.0, "reference": 2.0})
    hooks, row = rows_of(tmp_path, ours, peer)
    assert (hooks.peer, hooks.ratios) == ("hooks", [3.0] * 3)
    assert (row.peer, row.ratios, row.agreement) == ("peer", [0.375] * 3, "bit for bit")


def test_a_side_can_be_everybodys_reference(tmp_path: Path) -> None:
    ours = FakeSide(OURS, tmp_path, 1.0, {"library": 3.0})
    plain = FakeSide("plain", tmp_path, 1.0, {"library": 2.0})
    (row,) = rows_of(tmp_path, ours, plain, reference="plain")
    assert (row.peer, row.ratios) == ("plain", [1.5] * 3)


def test_other_values_give_no_ratio(tmp_path: Path) -> None:
    times = {"library": 1.0, "reference": 1.0}
    _, row = rows_of(tmp_path, FakeSide(OURS, tmp_path, 1.0, times), FakeSide("peer", tmp_path, 1.5, times))
    assert row.ratios is None
    assert row.agreement.startswith("differs, by 0.33")


def test_a_fault_is_a_row_and_ours_stays_measured(tmp_path: Path) -> None:
    times = {"library": 2.0, "reference": 1.0}
    hooks, row = rows_of(tmp_path, FakeSide(OURS, tmp_path, 1.0, times), FakeSide("peer", tmp_path, 1.0, {}))
    assert hooks.ratios == [2.0] * 3
    assert (row.ratios, row.agreement) == (None, "Broken: there")
    report = Report(describe_machine(), "peers", "How.", 3, [hooks, row])
    assert "Broken: there" in report.to_markdown()
    assert json.loads(report.to_json())["rows"][1]["ratio"] is None


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
        def prepare(self, number: int) -> None:
            raise NotOfferedError("no invokes") if number else ValueError("first\nsecond")

    conversation = Conversation(Refusing(), tmp_path)
    assert conversation.answer({"prepare": 1, "file": "a"}) == {"not_offered": "no invokes"}
    assert conversation.answer({"prepare": 0, "file": "a"}) == {"error": "ValueError: first"}
    assert "must be prepared" in conversation.answer({"repeat": True})["error"]


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "install.sh"
    script.write_text("echo 'ERROR: no network' >&2; echo bye >&2; exit 1")
    monkeypatch.setattr(environment, "_INSTALL", script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with pytest.raises(EnvironmentUnavailableError, match="ERROR: no network"):
        ensure_environment(tmp_path)


def test_an_interpreter_that_is_not_there_is_a_fault_and_no_crash(tmp_path: Path) -> None:
    with pytest.raises(SideError, match="No such file"):
        SideProcess("local", "peer", tmp_path / "python", [], {})


def test_a_side_that_ends_says_with_what(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho out of memory >&2\nexit 7\n")
    python.chmod(0o755)
    with (
        SideProcess("local", "peer", python, [], {}) as side,
        pytest.raises(SideError, match="ended with status 7: out of memory"),
    ):
        side.wait()
