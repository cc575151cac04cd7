"""The memory that the ability to intervene costs, idle and after requests that intervened.

Resident memory of an engine's process able to intervene, compared with that of a plain one in which nothing
of ours is imported: eager engines in separate processes, by turns, that serve the same plain requests. "Used"
also serves requests that steer, and requests that capture, at all layers.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Final

from benchmarks.case import BenchmarkCase, Plan, Sample, total
from benchmarks.process import ChildObject
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET_MIB: Final = 50.0
_MIB: Final = 1024 * 1024
_PLAIN: Final = "plain vLLM"
_BOUND: Final = "numba with LLVM takes 64 MiB, and the executor that it has compiled 51; the rest is 20"


def plan(_args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Return the case."""
    measures = (
        total("idle - plain vLLM, MiB", {"idle": 1, _PLAIN: -1}, target=_TARGET_MIB, bound=_BOUND),
        total("used - plain vLLM, MiB", {"used": 1, _PLAIN: -1}),
    )
    name = "resident memory of an engine's process"
    return Plan([BenchmarkCase(name, "8 requests", lambda: _sample, measures, unit="MiB")])


def _sample() -> Sample:
    model, sample = str(bundled_model_path()), {}
    for kind in (_PLAIN, "idle", "used"):
        with ChildObject("benchmarks.memory:EngineMemory", model, kind) as process:
            sample[kind] = process.call("resident_bytes") / _MIB
    return sample
