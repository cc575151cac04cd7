"""Suites of end-to-end tests, played again on engines of other kinds than a CPU's own.

A run plays one pair of suite and kind with the V1 runner, and a portion of one with the V2 runner. Which
ones follows from the number of commits: all come up where each commit is run.
``KINDS=all`` plays all pairs whole, and the soak; ``make test-kinds`` does so, which takes hours.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.engine_kinds import KINDS, V1_SYNC, EngineKind, environment
from tests.slices import is_heavy

pytestmark = pytest.mark.e2e

SUITES: Final = {
    "batching": 4,
    "cache": 4,
    "chunked_prefill": 3,
    "preemption": 2,
    "failures": 4,
    "conditions": 5,
    "features": 3,
    "patterns": 4,
    "traces": 8,
    "traces_scheduling": 4,
    "images": 6,
    "images_traces": 2,
    "mixer_states": 9,
    "hybrid_state": 4,
    "lora": 1,
    "numerics": 10,
    "tensor_parallel": 1,
    "host_waits": 2,
}
"""Suites, and into how many portions each is cut on V2."""
TRIED: Final = {
    "images": {"v1-async"},
    "images_traces": {"v1-async"},
    "mixer_states": {"v1-async"},
    "hybrid_state": {"v1-async"},
    "lora": {"v1-async", "v2-async"},
    "numerics": {"v1-async"},
    "tensor_parallel": {"v2-async", "v2-async-self_draft"},
    "host_waits": {"v2-async"},
}
"""Of suites that have not yet been tried on all kinds, those on which they are played."""
ON_THE_OWN_KIND: Final = {
    "compiled": "engines of kinds are eager",
    "differences": "checks a tool for families",
    "fair_scheduling": "times requests",
    "mixers_over_ranks": "on several ranks",
    "reads_change_nothing": "compares bits, and rows of other kinds' steps may be others",
    "sandboxed_tensor_parallel": "on several ranks",
    "sixteen_vectors": "needs what batching needs of a kind",
    "traces_caches": "needs what traces need of a kind",
    "traces_edits": "needs what traces need of a kind",
    "traces_names": "needs what traces need of a kind",
    "traces_pipeline": "over stages, as are kinds of their own",
    "traces_ray": "starts Ray",
    "traces_scans": "needs what traces need of a kind",
    "traces_soak": "played on one kind, as it takes minutes",
    "traces_taps": "compiled, and engines of kinds are eager",
    "traces_tensor_parallel": "on several ranks",
}
"""Modules of tests with engines of the harness that are no suites, and why."""
WHOLE: Final = "1/1"
SOAK: Final = ("traces_soak", EngineKind("v2", is_async=True, speculation="self_draft"), "")
_USES_THE_HARNESS: Final = re.compile(
    r"^from tests\.e2e\."
    r"((traces|renamed_model) import|harness import .*\bEngine\b|engine_kinds import options_of_process)",
    re.MULTILINE,
)
_HERE: Final = Path(__file__).resolve().parent
_SECONDS: Final = {"v1": 900, "v2": 3540}
"""After how long a suite is ended."""
_END_S: Final = 60
"""How long the test may take beside that."""
Pair = tuple[str, EngineKind]


def is_possible(suite: str, kind: EngineKind) -> bool:
    """Return whether a suite can be played: EAGLE and MTP draft for Llama, conditions need one stage."""
    if suite in TRIED:
        return str(kind) in TRIED[suite]
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


def turn() -> int:
    """Return which turn it is: that of the commit, or without git the day's."""
    try:
        told = subprocess.run([_HERE.parents[1] / ".ci/turn"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return datetime.datetime.now(datetime.UTC).date().toordinal()
    return int(told.stdout)


def chosen(turn: int) -> list[tuple[str, EngineKind, str]]:
    """Return the pairs of a run, each with its portion of the tests that are not heavy, or none for all."""
    v1 = [(*pair, WHOLE) for pair in pairs_of("v1")]
    if os.environ.get("KINDS") == "all":
        return [*v1, *((*pair, WHOLE) for pair in pairs_of("v2")), SOAK]
    v2 = [
        (suite, kind, f"{number}/{SUITES[suite]}")
        for suite, kind in pairs_of("v2")
        for number in range(1, SUITES[suite] + 1)
    ]
    return [v1[turn % len(v1)], v2[turn % len(v2)]]


def test_every_suite_meets_every_kind() -> None:
    pairs = pairs_of("v1") + pairs_of("v2")
    wanted = {
        (suite, kind) for suite in SUITES for kind in KINDS if kind != V1_SYNC and is_possible(suite, kind)
    }
    assert set(pairs) == wanted
    assert len(pairs) == len(wanted)


def test_no_suite_is_cut_into_more_portions_than_it_has_tests(request: pytest.FixtureRequest) -> None:
    modules = [f"tests/e2e/test_{suite}.py" for suite in SUITES]
    found = Counter(item.nodeid.partition("::")[0] for item in request.session.items if not is_heavy(item))
    few = {
        module: (found[module], portions)
        for module, portions in zip(modules, SUITES.values(), strict=True)
        if 0 < found[module] < portions  # those of other runs are not collected
    }
    assert not few


def test_every_module_with_engines_of_the_harness_is_a_suite_or_named() -> None:
    using = {
        path.stem.removeprefix("test_")
        for path in _HERE.glob("test_*.py")
        if _USES_THE_HARNESS.search(path.read_text(encoding="utf-8"))
    }
    assert using == SUITES.keys() | ON_THE_OWN_KIND.keys()


def play(suite: str, kind: EngineKind, portion: str) -> None:
    command = [sys.executable, "-m", "pytest", "--numprocesses", "0", "-q", "-p", "no:cacheprovider"]
    command += ["--timeout", str(_SECONDS[kind.runner]), f"tests/e2e/test_{suite}.py"]
    # Tests marked heavy cover more of the same.
    command += ["--portion", portion] if portion else []
    ran = subprocess.run(
        command,
        env={**os.environ, **environment(kind)},
        capture_output=True,
        text=True,
        timeout=_SECONDS[kind.runner],
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:]


@pytest.mark.timeout(_SECONDS["v2"] + _END_S)
@pytest.mark.parametrize(("suite", "kind", "portion"), chosen(turn()), ids=str)
def test_a_suite_passes_on_engines_of_another_kind(suite: str, kind: EngineKind, portion: str) -> None:
    play(suite, kind, portion)
