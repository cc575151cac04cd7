"""Suites of end-to-end tests, played again on engines of other kinds than the default."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from tests.e2e.engine_kinds import DEFAULT, KINDS, EngineKind, environment

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

SUITES: Final = (
    "batching",
    "cache",
    "chunked_prefill",
    "failures",
    "conditions",
    "features",
    "patterns",
    "traces",
    "traces_scheduling",
)
"""What every kind plays, where it can."""
_SECONDS: Final = 1500
_OTHERS: Final = [kind for kind in KINDS if kind != DEFAULT]


def is_possible(suite: str, kind: EngineKind) -> bool:
    """Return whether a suite can be played: EAGLE and MTP draft for Llama, conditions need one stage."""
    if suite == "conditions" and kind.num_stages > 1:
        return False
    return suite != "patterns" or kind.speculation not in {"eagle", "eagle3", "mtp"}


def play(kind: EngineKind, suites: list[str]) -> None:
    """Run suites in one process whose engines are of a kind; tests marked heavy cover more of the same."""
    command = [sys.executable, "-m", "pytest", "--numprocesses", "0", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not heavy", *(f"tests/e2e/test_{suite}.py" for suite in suites)]
    ran = subprocess.run(
        command,
        env={**os.environ, **environment(kind)},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]


@pytest.mark.timeout(_SECONDS + 60)
@pytest.mark.parametrize("kind", _OTHERS, ids=str)
def test_suites_pass_on_engines_of_another_kind(kind: EngineKind) -> None:
    play(kind, [suite for suite in SUITES if is_possible(suite, kind)])
