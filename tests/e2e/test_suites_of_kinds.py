"""Suites of end-to-end tests, played again on engines of other kinds than a CPU's own.

A run plays one pair of suite and kind, with the V1 runner: which one follows from the date, so that all come
up in turn. ``KINDS=all`` plays all pairs, with the V2 runner too; ``make test-kinds`` does so, which takes
hours.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from typing import Final

import pytest

from tests.e2e.engine_kinds import KINDS, V1_SYNC, EngineKind, environment

pytestmark = pytest.mark.e2e

SUITES: Final = (
    "batching",
    "cache",
    "chunked_prefill",
    "preemption",
    "failures",
    "conditions",
    "features",
    "patterns",
    "traces",
    "traces_scheduling",
)
_SECONDS: Final = {"v1": 900, "v2": 3600}
"""After how long a suite is ended."""
Pair = tuple[str, EngineKind]


def is_possible(suite: str, kind: EngineKind) -> bool:
    """Return whether a suite can be played: EAGLE and MTP draft for Llama, conditions need one stage."""
    if suite == "conditions" and kind.num_stages > 1:
        return False
    return suite != "patterns" or kind.speculation not in {"eagle", "eagle3", "mtp"}


def pairs_of(runner: str) -> list[Pair]:
    """Return all pairs with a runner, in an order in which suites and kinds take turns."""
    kinds = [kind for kind in KINDS if kind.runner == runner and kind != V1_SYNC]
    return [
        pair
        for shift in range(len(kinds))
        for number, suite in enumerate(SUITES)
        if is_possible(*(pair := (suite, kinds[(number + shift) % len(kinds)])))
    ]


def chosen() -> list[Pair]:
    """Return the pairs of this run."""
    pairs = pairs_of("v1")
    if os.environ.get("KINDS") == "all":
        return [*pairs, *pairs_of("v2")]
    return [pairs[datetime.datetime.now(datetime.UTC).date().toordinal() % len(pairs)]]


def test_every_suite_meets_every_kind() -> None:
    pairs = pairs_of("v1") + pairs_of("v2")
    wanted = {
        (suite, kind) for suite in SUITES for kind in KINDS if kind != V1_SYNC and is_possible(suite, kind)
    }
    assert set(pairs) == wanted
    assert len(pairs) == len(wanted)


def play(suite: str, kind: EngineKind) -> None:
    # Tests marked heavy cover more of the same.
    command = [sys.executable, "-m", "pytest", "--numprocesses", "0", "-q", "-p", "no:cacheprovider"]
    # A single test may take most of the time where kernels are interpreted.
    command += ["--timeout", str(_SECONDS[kind.runner]), "-m", "not heavy", f"tests/e2e/test_{suite}.py"]
    ran = subprocess.run(
        command,
        env={**os.environ, **environment(kind)},
        capture_output=True,
        text=True,
        timeout=_SECONDS[kind.runner],
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]


@pytest.mark.timeout(_SECONDS["v2"])
@pytest.mark.parametrize(("suite", "kind"), chosen(), ids=str)
def test_a_suite_passes_on_engines_of_another_kind(suite: str, kind: EngineKind) -> None:
    play(suite, kind)
