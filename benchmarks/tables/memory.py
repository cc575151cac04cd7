"""What being able to intervene costs in memory, idle and after requests that intervened.

Resident memory of an engine's process able to intervene, beside that of a plain one in which nothing of ours
is imported: separate processes, by turns.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Final

from benchmarks.case import Case, Measure, Plan, Sample
from benchmarks.precision import DTYPE_NAME
from benchmarks.process import Process
from nnsight_engine.modeling.bundled import bundled_model_path

_TARGET_MIB: Final = 50.0
_MIB: Final = 1024 * 1024
_PROCESSES: Final = {
    "plain vLLM": ("benchmarks.memory.plain",),
    "idle": ("benchmarks.memory.able",),
    "used": ("benchmarks.memory.able", "--used"),
}
_METHOD: Final = f"""\
SmolLM2-135M-Instruct in {DTYPE_NAME}, eager. Each process loads an engine and serves the same plain requests;
"used" also serves requests that steer, and requests that capture, at all layers."""


def add_options(_parser: argparse.ArgumentParser) -> None:
    """Add none."""


def plan(_args: argparse.Namespace, _stack: contextlib.ExitStack) -> Plan:
    """Return the case."""
    case = Case(
        "resident memory of an engine's process",
        "8 requests",
        lambda: _sample,
        (
            Measure("idle - plain vLLM, MiB", lambda one: one["idle"] - one["plain vLLM"], _TARGET_MIB),
            Measure("used - plain vLLM, MiB", lambda one: one["used"] - one["plain vLLM"]),
        ),
        unit="MiB",
    )
    return Plan("memory", "Memory of an engine's process", _METHOD, [case])


def _sample() -> Sample:
    model, sample = str(bundled_model_path()), {}
    for name, (module, *options) in _PROCESSES.items():
        with Process(module, "--model", model, *options) as process:
            sample[name] = process.read()["resident_bytes"] / _MIB
    return sample
