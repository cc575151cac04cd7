"""What a run is judged by: ratios of its own numbers, and no number is a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtests.run_spec import SHAPES, phases_of
from loadtests.summary import Percentiles, Summary, SummaryRow
from loadtests.thresholds import DEFAULT_FILE, Threshold, ThresholdError, judged, read


def times(middle: float) -> Percentiles:
    return Percentiles(num=9, p50=middle, p95=2 * middle, p99=3 * middle)


def row(kind: str, phase: str = "calm", *, itl: float | None = None, **rest: Any) -> SummaryRow:
    counts = {"num_requests": 5, "num_refused": 0, "num_left": 0, "num_failed": 0, "error_share": 0.0}
    rates = {"num_tokens": 50, "requests_per_s": 0.5, "tokens_per_s": 5.0}
    measured = None if itl is None else times(itl)
    return SummaryRow(kind=kind, phase=phase, seconds=10, itl_ms=measured, **{**counts, **rates, **rest})


def summary(*rows: SummaryRow, **rest: Any) -> Summary:
    return Summary(
        scenario="mixed", shape="steady", url="", model="m", seconds=10, users=1, client_cpu=0.1,
        rows=list(rows), errors={}, **rest,
    )  # fmt: skip


def kept(found: Summary, **threshold: Any) -> list[bool]:
    return [one.is_kept for one in judged(found, [Threshold(**threshold)]).verdicts]


def test_a_ratio_is_to_another_kind_of_the_same_phase() -> None:
    found = summary(
        row("plain", itl=10), row("lens", itl=14), row("plain", "flood", itl=50), row("lens", "flood", itl=90)
    )
    wanted: dict[str, Any] = {"kind": "lens", "measure": "itl_p50", "of_kind": "plain"}
    assert kept(found, **wanted, most=1.5) == [True, False]
    (calm, flood) = judged(found, [Threshold(**wanted, most=1.5)]).verdicts
    assert calm.rule == "lens, calm: itl_p50 / that of plain, calm ≤ 1.5"
    assert flood.value == pytest.approx(1.8)


def test_a_ratio_is_to_another_phase_of_the_same_kind() -> None:
    found = summary(row("plain", itl=10), row("plain", "flood", itl=30))
    assert kept(found, measure="itl_p95", of_phase="calm", phase="flood", most=3) == [True]
    assert kept(found, measure="itl_p95", of_phase="calm", phase="flood", most=2.9) == [False]
    assert kept(found, measure="itl_p95", of_phase="calm", most=3) == [True], (
        "nothing is compared with itself"
    )


def test_a_number_that_is_missing_is_a_miss() -> None:
    assert kept(summary(row("plain")), measure="itl_p50", most=1e9) == [False]
    assert kept(summary(row("plain", num_requests=0)), measure="error_share", most=0) == [False]
    assert kept(
        summary(row("plain"), row("lens", itl=1)), measure="itl_p50", kind="lens", of_kind="plain", most=9
    ) == [False]


def test_what_a_run_does_not_have_is_not_for_it() -> None:
    found = summary(row("plain", itl=1))
    assert kept(found, measure="itl_p50", kind="lens", most=0) == []
    assert kept(found, measure="itl_p50", phase="flood", most=0) == []
    assert kept(found, measure="itl_p50", of_kind="lens", most=0) == []


def test_the_polite_are_all_but_the_hostile_tenant() -> None:
    found = summary(row("plain"), row("flood", error_share=1.0))
    assert kept(found, kind="*polite", measure="error_share", most=0) == [True]
    assert kept(found, measure="error_share", most=0) == [True, False]
    assert kept(found, kind="plain", measure="tokens_per_s", least=5.1) == [False]


def test_a_run_is_kept_if_all_of_it_is_and_no_user_crashed() -> None:
    wanted = [Threshold(measure="error_share", most=0)]
    assert judged(summary(row("plain")), wanted).is_kept
    assert not judged(summary(row("plain", error_share=0.1)), wanted).is_kept
    assert not judged(summary(row("plain"), crashes=["KeyError"]), wanted).is_kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[threshold]]\nmeasure = "ttft"\nmost = 1', "must be one of error_share.*got 'ttft'"),
        ('[[threshold]]\nmeasure = "ttft_p50"\nmost = 1\nkind = "plian"', r"`kind` .*\*polite.*got 'plian'"),
        (
            '[[threshold]]\nmeasure = "ttft_p50"\nmost = 1\nphase = "warm-up"',
            "`phase` .*flood.*got 'warm-up'",
        ),
        ('[[threshold]]\nmeasure = "ttft_p50"\nmost = 1\nof_kind = "*"', r"`of_kind` .*plain.*got '\*'"),
        ('[[threshold]]\nmeasure = "ttft_p50"\nmost = 1\nof_phase = "befor"', "`of_phase` .*got 'befor'"),
        ('[[threshold]]\nmeasure = "ttft_p50"', "needs `most` or `least`"),
        ('[[threshold]]\nmeasure = "ttft_p50"\nmost = 1\nscenario = "x"', "unknown field `scenario`"),
        ("[[threshold", "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ThresholdError, match=message):
        read(file)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_projects_own_file_judges_every_phase_of_a_mixed_run(shape: str) -> None:
    kinds = ("plain", "steered-same", "steered-different", "lens", "capture")
    phases = [phase for phase in phases_of(shape, has_hostile=True) if phase.is_counted]
    rows = [
        row(kind, phase.name, itl=10, ttft_ms=times(5), e2e_ms=times(90))
        for kind in kinds
        for phase in phases
    ]
    verdicts = judged(summary(*rows), read(DEFAULT_FILE)).verdicts
    assert all(one.is_kept for one in verdicts)
    assert {one.rule.partition(":")[0] for one in verdicts} == {
        f"{kind}, {phase.name}" for kind in kinds for phase in phases
    }
    # What a hostile tenant or a spike does to neighbours is judged by the time before.
    judged_by_time = {one.rule.partition(" / ")[0] for one in verdicts if "that of plain" in one.rule}
    for phase in phases[1:]:
        assert f"plain, {phase.name}: ttft_p50" in judged_by_time
