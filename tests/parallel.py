"""Which tests run in one process where two share the work, so that servers and engines start once.

``make test`` has two processes of one thread of torch's each: engines that bind to the same
cores wait for each other by spinning. ``WORKERS=0`` runs all tests in one process, in order.
"""

from __future__ import annotations

import zlib
from collections.abc import MutableMapping
from typing import Final

import pytest
from xdist.scheduler import LoadScopeScheduling

WORKER: Final = "PYTEST_XDIST_WORKER"
_TOGETHER: Final = {
    "narrow_server": tuple(
        f"tests/e2e/test_{name}.py"
        for name in (
            "remote",
            "odd_requests",
            "clients",
            "conditions_http",
            "features_http",
        )
    ),
    "bundled_server": tuple(
        f"tests/e2e/test_{name}.py" for name in ("detectors", "example", "sae_example", "sweeps", "vectors")
    ),
    "shared_live": tuple(
        f"tests/e2e/test_{name}.py" for name in ("http", "op_trace", "responses_and_messages")
    ),
    "keyed_server": tuple(
        f"tests/e2e/test_{name}.py"
        for name in ("keys", "sandbox", "sandbox_corpus", "tenants", "hostile_requests")
    ),
    "chunked_engine": tuple(
        f"tests/e2e/test_{name}.py" for name in ("chunked_prefill", "conditions", "features")
    ),
    "renamed_model": tuple(
        f"tests/e2e/test_traces_{name}.py" for name in ("caches", "edits", "names", "runs", "scans")
    ),
    "ray": tuple(f"tests/e2e/test_{name}.py" for name in ("traces_ray", "served_front", "replicas")),
    "guide": ("tests/guide/",),
    "playground": ("tests/playground/",),
    "modeling": ("tests/unit/modeling/",),
}
"""Beginnings of paths; the first that fits counts."""
SHARED_FIXTURES: Final = (
    "bundled_server",
    "shared_live",
    "narrow_server",
    "keyed_server",
    "chunked_engine",
    "renamed_model",
)
"""Servers and engines that all modules which use them share, as a group of their name."""
_PORTIONS: Final = {"tests/e2e/test_families.py": 8}
"""Modules whose tests have a model family as their first parameter, each family in one of so many groups."""
_KINDS: Final = "tests/e2e/test_kinds.py"
"""The module whose tests have a kind of engine as their only parameter, each kind a group."""


def group_of(nodeid: str) -> str:
    """Return what the module of a test runs together with: itself, unless it shares what is expensive.

    Of modules with families it is ``MODULE PORTION``, of the one with kinds ``MODULE KIND``.
    """
    path, _, test = nodeid.partition("::")
    parameters = test.partition("[")[2].rstrip("]")
    if path == _KINDS and parameters:
        return f"{path} {parameters}"
    if path in _PORTIONS:
        family = parameters.partition("-")[0]
        return f"{path} {zlib.crc32(family.encode()) % _PORTIONS[path] + 1}"
    return next((name for name, begins in _TOGETHER.items() if path.startswith(begins)), path)


class Scheduling(LoadScopeScheduling):
    """Gives a process one group after another, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    """Return the scheduler of a run with several processes."""
    config.option.loadscopereorder = False  # the longest come first, engines, which tests/e2e are
    return Scheduling(config, log)


def take_one_core(environment: MutableMapping[str, str]) -> None:
    """Have this process, and those that it starts, compute in one thread."""
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setdefault("NUMBA_NUM_THREADS", "1")  # in which vLLM looks n-grams up


__all__ = ["SHARED_FIXTURES", "WORKER", "group_of", "make_scheduler", "take_one_core"]
