"""Every model family on vLLM's V2 runner: all that ``test_families`` checks on V1."""

from __future__ import annotations

import pytest

from tests.e2e.engine_kinds import V2_SYNC, environment
from tests.e2e.family_reports import FamilyReports
from tests.families.checkpoints import FAMILIES, UNTABLED, VARIANTS

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyReports:
    return FamilyReports(request, tmp_path_factory.mktemp, environment(V2_SYNC))


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS, *UNTABLED])
def test_a_family_agrees_with_transformers(family: str, report: FamilyReports) -> None:
    failures = {check: failure for check, failure in report(family).items() if failure is not None}
    assert not failures, "\n".join(f"{check}: {failure}" for check, failure in failures.items())
