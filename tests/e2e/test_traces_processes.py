"""Blocks in an engine that has processes of its own, as it has in production: everything travels as bytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.check_process import report_of
from tests.e2e.traces_processes_check import CASES

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("processes")
    checks = "tests.e2e.traces_processes_check"
    return report_of(checks, folder, ["llama"], engine_in_process=False)["llama"]


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_in_a_process_of_its_own(report: Any, case: str) -> None:
    assert report[case] is None, report[case]
