"""From samples to a table: medians of paired ratios, targets, cases that were not measured, added rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.case import BenchmarkCase, Measure, NotMeasuredError, Plan, Sample, Sampler, difference, ratio
from benchmarks.machine import Machine
from benchmarks.report import BenchmarkReport, ReportError, Row, rows_of
from benchmarks.runner import run

HERE = Machine("2026-01-01", "abc1234", "a CPU", 2, 0.1, {"python": "3.11"})


def sampler_of(samples: list[Sample]) -> Sampler:
    left = iter(samples)
    return lambda: next(left)


def case(name: str, samples: list[Sample], *measures: Measure, **rest: Any) -> BenchmarkCase:
    return BenchmarkCase(name, "small", lambda: sampler_of(samples), measures, **rest)


def measured(
    *cases: BenchmarkCase, repeats: int = 3, processes: int = 1, in_rounds: bool = False
) -> list[Row]:
    plan = Plan(cases, in_rounds=in_rounds)
    return rows_of([list(run(plan, repeats))[-1] for _ in range(processes)])


def pairs(ours: list[float], plain: list[float]) -> list[Sample]:
    return [{"ours": one, "plain": other} for one, other in zip(ours, plain, strict=True)]


def report_of(*cases: BenchmarkCase, machine: Machine = HERE) -> BenchmarkReport:
    return BenchmarkReport(machine, "name", "Title.\n\nHow.", ["a command"], measured(*cases))


def test_a_ratio_is_the_median_over_processes_of_medians_of_pairs() -> None:
    plain = [[100.0, 50.0, 200.0], [100.0] * 3, [100.0] * 3]
    ours = [[90.0, 50.0, 190.0], [120.0] * 3, [80.0, 80.0, 90.0]]
    runs = iter(zip(ours, plain, strict=True))
    measures = (ratio("ours", "plain", 0.985, is_floor=True),)
    idle = BenchmarkCase("idle", "8", lambda: sampler_of(pairs(*next(runs))), measures, "tokens/s")
    (row,) = measured(idle, processes=3)
    assert (row.value, row.sides) == (0.95, {"ours": 90.0, "plain": 100.0})
    assert (row.processes, row.worst) == ((0.8, 1.2), 0.8)
    assert (row.num_processes, row.num_repeats) == (3, 3)
    assert row.reached is False


@pytest.mark.parametrize(
    ("is_floor", "value", "expected"), [(True, 1.1, True), (True, 0.9, False), (False, 1.1, False)]
)
def test_a_floor_is_reached_from_above_and_a_limit_from_below(
    is_floor: bool, value: float, expected: bool
) -> None:
    measure = ratio("ours", "plain", 1.0, is_floor=is_floor)
    (row,) = measured(case("one", pairs([value, value, 1.0], [1.0] * 3), measure))
    assert row.reached is expected
    assert row.worst == (min if is_floor else max)(value, 1.0)


def test_a_difference_and_its_sides_have_their_unit() -> None:
    (row,) = measured(
        case("one", pairs([0.003] * 3, [0.001] * 3), difference("ours", "plain", "ms"), unit="ms")
    )
    assert row.value == pytest.approx(2.0)
    assert row.sides == {"ours": 3.0, "plain": 1.0}


def test_a_case_that_is_not_measured_says_why_and_others_go_on() -> None:
    def refuse() -> Sampler:
        raise NotMeasuredError("no GPU | here")

    def break_down() -> Sample:
        raise NotMeasuredError("it broke")

    one = ratio("ours", "plain", 1.0)
    refused = BenchmarkCase("refused", "", refuse, (one,))
    broken = BenchmarkCase("broken", "", lambda: break_down, (one,))
    report = report_of(refused, broken, case("measured", pairs([1.0] * 3, [1.0] * 3), one))
    assert [(row.value, row.reached, row.note) for row in report.rows] == [
        (None, None, "no GPU | here"),
        (None, None, "it broke"),
        (1.0, True, ""),
    ]
    assert "no GPU / here" in report.to_markdown()


def test_every_round_starts_with_another_case_and_a_long_case_runs_less_often() -> None:
    order: list[str] = []

    def noting(name: str, repeats: int | None = None) -> BenchmarkCase:
        def sample() -> Sample:
            order.append(name)
            return {"x": 1.0}

        return BenchmarkCase(name, "", lambda: sample, (), max_repeats=repeats)

    measured(noting("a"), noting("b", 1), repeats=2, in_rounds=True)
    assert order == ["a", "b", "a"]
    order.clear()
    measured(noting("a"), noting("b"), repeats=2, in_rounds=True)
    assert order == ["a", "b", "b", "a"]


def test_parts_make_one_table_and_a_case_measured_again_replaces_its_row(tmp_path: Path) -> None:
    def at(name: str, value: float) -> BenchmarkCase:
        return case(name, pairs([value] * 3, [1.0] * 3), ratio("ours", "plain"))

    written = report_of(at("idle", 0.9), at("steered", 0.9)).write(tmp_path)
    assert json.loads(written.with_suffix(".json").read_text(encoding="utf-8"))["rows"][0]["value"] == 0.9
    busy = dataclasses.replace(HERE, load=1.5)
    whole = report_of(at("idle", 0.99), machine=busy).added_to(tmp_path)
    assert {row.case: row.value for row in whole.rows} == {"steered": 0.9, "idle": 0.99}
    assert len(whole.commands) == 2
    assert "busy" in whole.to_markdown()


def test_a_table_never_mixes_commits(tmp_path: Path) -> None:
    one = case("idle", pairs([1.0] * 3, [1.0] * 3), ratio("ours", "plain"))
    report_of(one).write(tmp_path)
    later = dataclasses.replace(HERE, commit="def5678")
    with pytest.raises(ReportError, match="abc1234"):
        report_of(one, machine=later).added_to(tmp_path)
