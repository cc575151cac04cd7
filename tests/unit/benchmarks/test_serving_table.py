"""What a reader of the serving table relies on: which cases there are, ratios, and tables made of parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.cases import all_cases
from benchmarks.machine import Machine
from benchmarks.ratios import summarize
from benchmarks.report import Report, ReportError, check_addable
from benchmarks.selection import chosen

HERE = Machine("2026-01-01", "abc1234", "a CPU", 2, 0.1, {"python": "3.11"})


def report_of(*words: str, ours: float = 90.0, machine: Machine = HERE, mode: str = "compiled") -> Report:
    cases = chosen([1, 8], [16], words, "decode")
    rows = [summarize(case, mode, [[100.0, 50.0, 200.0]], [[ours, ours / 2, ours]], 24) for case in cases]
    return Report(mode, machine, [f"a command with {' '.join(words)}"], rows)


def test_every_batch_runs_behind_short_prompts_and_one_behind_long_ones() -> None:
    idle = [case for case in all_cases([1, 4, 32], [16, 512]) if case.key.startswith("decode/idle/")]
    assert [(case.num_requests, case.prompt_tokens) for case in idle] == [
        (1, 16),
        (4, 16),
        (32, 16),
        (4, 512),
    ]
    keys = [case.key for case in all_cases([1, 8, 32, 64], [16, 512])]
    assert len(keys) == len(set(keys))


def test_a_ratio_is_the_median_over_processes_of_medians_of_pairs() -> None:
    (case,) = chosen([8], [16], ["idle"], "decode")
    plain = [[100.0, 50.0, 200.0], [100.0, 100.0, 100.0], [100.0, 100.0, 100.0]]
    ours = [[90.0, 50.0, 190.0], [120.0, 120.0, 120.0], [80.0, 80.0, 90.0]]
    row = summarize(case, "compiled", plain, ours, 24)
    assert (row.ratio, row.ours, row.plain) == (0.95, 90.0, 100.0)
    assert row.processes == (0.8, 1.2)
    assert (row.num_processes, row.num_repeats) == (3, 3)
    assert (row.target, row.reached) == (0.985, False)


def test_a_first_token_reaches_its_target_from_below() -> None:
    (case,) = chosen([8], [16], ["one steer"], "first_token")
    for mode in ("compiled", "eager"):
        assert [case.reached(ratio, mode) for ratio in (1.0, 1.2)] == [True, False]


def test_a_missed_target_is_marked_and_says_what_bounds_it() -> None:
    text = report_of("idle", "control").to_markdown()
    assert "| idle | 8 | 16 | 0.900 |" in text
    assert "| no |" in text
    assert "- idle: What idle taps cost" in text
    assert "- (control" not in text


def test_an_eager_engine_is_not_judged_by_the_compiled_ones_targets() -> None:
    report = report_of("idle", mode="eager")
    assert {(row.target, row.reached) for row in report.rows} == {(None, None)}
    assert "bounds" not in report.to_markdown()


def test_parts_make_one_table_and_a_case_measured_again_replaces_its_row(tmp_path: Path) -> None:
    report_of("idle", "one request steered").write(tmp_path)
    busy = dataclasses.replace(HERE, load=1.5)
    whole = report_of("idle", ours=99.0, machine=busy).added_to(tmp_path)
    assert {(row.name, row.num_requests): round(row.ours) for row in whole.rows} == {
        ("one request steered", 1): 90,
        ("one request steered", 8): 90,
        ("idle", 1): 99,
        ("idle", 8): 99,
    }
    assert len(whole.commands) == 2
    assert "busy" in whole.to_markdown()


def test_a_table_never_mixes_commits(tmp_path: Path) -> None:
    report_of("idle").write(tmp_path)
    later = dataclasses.replace(HERE, commit="def5678")
    with pytest.raises(ReportError, match="abc1234"):
        report_of("idle", machine=later).added_to(tmp_path)
    with pytest.raises(ReportError, match="leave --add out"):  # and before anything is measured
        check_addable(tmp_path, "compiled", later)
