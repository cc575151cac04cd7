"""Every model family: what the engine reads, writes and generates is what transformers does.

Each family's checkpoint is checked in a process of its own, see ``family_check``; the tests
here read its report, so that a test's name says which check of which family failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.family_check import CHECKS, COMPILED_CHECKS, COMPILED_FAMILIES, REPORT
from tests.families.checkpoints import FAMILIES, VARIANTS

pytestmark = pytest.mark.e2e

PROJECT: Final = Path(__file__).resolve().parents[2]
_NUM_PROCESSES: Final = 2
_TIMEOUT_S: Final = 240
_OUTPUT_SHOWN: Final = 6000

Report = dict[str, str | None]


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Report]]]:
    """Start the processes of the families that are to be tested, two at a time."""
    calls = [
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    families = list(dict.fromkeys(str(call.params["family"]) for call in calls))
    with ThreadPoolExecutor(_NUM_PROCESSES) as pool:
        yield {
            family: pool.submit(check_family, family, tmp_path_factory.mktemp(family)) for family in families
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", params=FAMILIES + VARIANTS)
def family(request: pytest.FixtureRequest) -> str:
    """Every family and variant."""
    return str(request.param)


def check_family(family: str, folder: Path) -> Report:
    """Run a family's checks; raises AssertionError with the output when they came to no report."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A graph compiled by an earlier version of the taps must not be found.
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        # Two processes share the cores; left alone, both would bind to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.family_check", family, str(folder)],
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_TIMEOUT_S,
        check=False,
    )
    output = done.stdout.decode("utf-8", "replace")[-_OUTPUT_SHOWN:]
    assert done.returncode == 0, f"{family} exited with {done.returncode}:\n{output}"
    report: Report = json.loads((folder / REPORT).read_text())
    return report


@pytest.mark.parametrize("check", CHECKS)
def test_family_agrees_with_transformers(family: str, check: str, reports: dict[str, Future[Report]]) -> None:
    failure = reports[family].result()[check]
    assert failure is None, failure


@pytest.mark.parametrize("family", COMPILED_FAMILIES, scope="module")
@pytest.mark.parametrize("check", COMPILED_CHECKS)
def test_compiled_engine_agrees_with_transformers(
    family: str, check: str, reports: dict[str, Future[Report]]
) -> None:
    failure = reports[family].result()[check]
    assert failure is None, failure
