"""The mixed load test against the real server, which the command starts itself with keys of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.run_spec import HOSTILE, SCENARIOS
from loadtests.summary import Summary, read

pytestmark = [pytest.mark.e2e, pytest.mark.heavy, pytest.mark.timeout(1200)]

# Long prompts are left out: one may take the whole of so short a run, in which others go before it.
SERVED = [kind for kind in SCENARIOS["mixed"] if kind not in {*HOSTILE, "long-prompt"}]


def test_all_tenants_are_served_while_one_floods(tmp_path: Path) -> None:
    thresholds = tmp_path / "thresholds.toml"
    thresholds.write_text("", encoding="utf-8")  # times of so short a run on a busy machine say nothing
    command = [sys.executable, "-m", "loadtests", "mixed", "--thresholds", str(thresholds)]
    # Each kind's first request, for which sandboxes start, has to end before the flood does: how long that
    # takes depends on what else the machine does.
    for seconds in ("36", "200"):
        done = subprocess.run(
            [*command, "--time", seconds, "--output", str(tmp_path), "--", "--max-model-len", "1024"],
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        summary = read(tmp_path / "summary.json", Summary)
        assert summary.errors == {}
        served = {kind: row for kind in SERVED if (row := summary.row(kind, "flood")) and row.num_requests}
        if len(served) == len(SERVED):
            break
    assert list(served) == SERVED
    for kind, row in served.items():
        assert row.num_tokens > row.num_requests, kind
        assert row.e2e_ms is not None
        if kind not in {"trace-message", "jobs"}:
            assert row.ttft_ms is not None
            assert 0 < row.ttft_ms.p50 < row.e2e_ms.p50, kind
    flood = summary.row("flood", "flood")
    assert flood is not None
    assert flood.num_requests
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(told in report for told in ("TTFT", "ITL", "E2E", "(flood)"))


def test_a_threshold_that_is_missed_fails_the_command(tmp_path: Path) -> None:
    thresholds = tmp_path / "thresholds.toml"
    thresholds.write_text(
        '[[threshold]]\nkind = "plain"\nmeasure = "ttft_p50"\nmost = 0.001\n', encoding="utf-8"
    )
    command = [sys.executable, "-m", "loadtests", "plain", "--shape", "spike", "--time", "6"]
    command += ["--thresholds", str(thresholds), "--output", str(tmp_path), "--", "--max-model-len", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MISSED plain, spike: ttft_p50 ≤ 0.001" in done.stdout
    summary = read(tmp_path / "summary.json", Summary)
    assert [row.phase for row in summary.rows] == ["before", "spike", "after"]
    assert not any(verdict.is_kept for verdict in summary.verdicts)
