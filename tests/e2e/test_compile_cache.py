"""Compiled models that are kept: none is ever used without the taps that it was not compiled with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.check_process import report_of

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]


def test_what_plain_vllm_or_other_taps_left_in_the_cache_does_not_serve(tmp_path: Path) -> None:
    reports = report_of("tests.e2e.compile_cache_check", tmp_path, ["none", "off", "all"])
    assert len({report["key"] for report in reports.values()}) == len(reports)
    plain = reports["none"]["plain"]
    assert all(report["plain"] == plain for report in reports.values())
    steered = [reports[taps]["steered"] for taps in ("off", "all")]
    assert steered[0] != plain
    assert steered[0] == steered[1]
    tiers = [reports[taps]["tier"] for taps in ("off", "all")]
    assert tiers == ["eager", "tap"]
